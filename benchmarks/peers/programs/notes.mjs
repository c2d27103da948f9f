// What handlers of the Node peers note, and their publisher. The counterpart of notes.py and publishing.py.
import fs from "node:fs";
import path from "node:path";

const file = fs.openSync(path.join(process.env.PEER_FOLDER, "lines.txt"), "a", 0o600);

export const uri = process.env.PEER_URI;
export const lease = process.env.PEER_LEASE ? Number(process.env.PEER_LEASE) : null;
export const isWorker = process.argv[2] === "worker";

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export async function handle([number, sent, holdMs]) {
  fs.writeSync(file, `b ${number} ${sent} ${process.hrtime.bigint()}\n`);
  if (holdMs) {
    await pause(holdMs);
    fs.writeSync(file, `e ${number} 0 ${process.hrtime.bigint()}\n`);
  }
}

export async function publish(single, bulk = null) {
  const [kind, count, first, holdMs, rate] = [process.argv[3], ...process.argv.slice(4).map(Number)];
  const began = process.hrtime.bigint();
  if (kind === "bulk" && bulk) {
    await bulk(Array.from({ length: count }, (_, index) => [first + index, 0, holdMs]));
  } else {
    for (let index = 0; index < count; index++) {
      if (kind === "paced") {
        const since = Number(process.hrtime.bigint() - began) / 1e6;
        const wait = (index * 1000) / rate - since;
        if (wait > 0) await pause(wait);
      }
      // As text: the number of nanoseconds is larger than JavaScript's exact integers.
      await single([first + index, String(process.hrtime.bigint()), holdMs]);
    }
  }
  const seconds = Number(process.hrtime.bigint() - began) / 1e9;
  fs.writeSync(1, JSON.stringify({ seconds, is_bulk: bulk !== null }) + "\n");
  process.exit(0);
}

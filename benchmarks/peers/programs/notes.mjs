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
  const [kind, count, first, holdMs, bound] = [process.argv[3], ...process.argv.slice(4).map(Number)];
  const began = process.hrtime.bigint();
  const passed = () => Number(process.hrtime.bigint() - began) / 1e9;
  let published = count;
  if (kind === "bulk" && bulk) {
    await bulk(Array.from({ length: count }, (_, index) => [first + index, 0, holdMs]));
  } else {
    for (let index = 0; index < count; index++) {
      if (kind === "paced") {
        const wait = index / bound - passed();
        if (wait > 0) await pause(wait * 1000);
      } else if (bound && passed() > bound) {
        published = index;
        break;
      }
      // As text: the number of nanoseconds is larger than JavaScript's exact integers.
      await single([first + index, String(process.hrtime.bigint()), holdMs]);
    }
  }
  fs.writeSync(1, JSON.stringify({ seconds: passed(), count: published, is_bulk: bulk !== null }) + "\n");
  process.exit(0);
}

// keuss on MongoDB, with a document for each task: 10 consumers in one process. By default a task is popped, as in its
// quickstart; with a lease it is reserved and committed. Its own signals, over a capped collection, end the second process
// with an error on MongoDB 6 ("already exists"), so consumers ask again after 20 ms; its statistics stay in memory.
// Its backend with buckets is not measured: it acknowledges a task before it is stored.
import { createRequire } from "node:module";
import { handle, isWorker, lease, publish, uri } from "./notes.mjs";

const require = createRequire(import.meta.url);
const CONSUMERS = 10;
const backend = require("keuss/backends/mongo");
const reserves = lease !== null;
const asked = (ask) =>
  new Promise((resolve, reject) => ask((error, value) => (error ? reject(error) : resolve(value))));

const options = {
  url: uri,
  pollInterval: 20,
  signaller: { provider: require("keuss/signal/local") },
  stats: { provider: require("keuss/stats/mem") },
  ...(lease ? { reserve_delay: lease } : {}),
};
const factory = await asked((done) => backend(options, done));
const queue = await asked((done) => factory.queue("noop", {}, done));

async function consume() {
  for (;;) {
    const task = await asked((done) => queue.pop("worker", { reserve: reserves }, done));
    await handle(task.payload.task);
    if (reserves) await asked((done) => queue.ok(task, done));
  }
}

if (isWorker) for (let index = 0; index < CONSUMERS; index++) consume();
else await publish((task) => asked((done) => queue.push({ task }, done)));

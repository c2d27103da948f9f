// keuss on MongoDB: 10 consumers in one process. PEER_BACKEND: "mongo", a document for each task, or "bucket-mongo-safe",
// up to 1,024 tasks in a document. By default a task is popped, as in its quickstart; with a lease it is reserved and
// committed.
import { createRequire } from "node:module";
import { handle, isWorker, lease, publish, uri } from "./notes.mjs";

const require = createRequire(import.meta.url);
const CONSUMERS = 10;
const name = process.env.PEER_BACKEND ?? "mongo";
const backend = require(`keuss/backends/${name}`);
const reserves = lease !== null;
const asked = (ask) =>
  new Promise((resolve, reject) => ask((error, value) => (error ? reject(error) : resolve(value))));

const factory = await asked((done) => backend({ url: uri, ...(lease ? { reserve_delay: lease } : {}) }, done));
const queue = await asked((done) => factory.queue("noop", lease ? { reserve_delay: lease } : {}, done));

async function consume() {
  for (;;) {
    const task = await asked((done) => queue.pop("worker", { reserve: reserves }, done));
    await handle(task.payload.task);
    if (reserves) await asked((done) => queue.ok(task, done));
  }
}

if (isWorker) for (let index = 0; index < CONSUMERS; index++) consume();
else {
  // A bucket is written when it is full or after a while: calls one after another would each wait for that.
  const push = (task) => asked((done) => queue.push({ task }, done));
  const isBucket = name !== "mongo";
  await publish(push, isBucket ? (tasks) => Promise.all(tasks.map(push)) : null);
}

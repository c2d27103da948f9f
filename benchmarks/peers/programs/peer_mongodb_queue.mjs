// mongodb-queue: 10 loops of get and ack in one process, which ask an empty queue again after 20 ms.
import { createRequire } from "node:module";
import { handle, isWorker, lease, publish, uri } from "./notes.mjs";

const require = createRequire(import.meta.url);
const { MongoClient } = require("mongodb3");
const mongodbQueue = require("mongodb-queue");
const LOOPS = 10;
const PAUSE_MS = 20;
const asked = (ask) =>
  new Promise((resolve, reject) => ask((error, value) => (error ? reject(error) : resolve(value))));

const client = await MongoClient.connect(uri, { useUnifiedTopology: true, w: "majority" });
const queue = mongodbQueue(client.db(), "noop", lease ? { visibility: lease } : {});
await asked((done) => queue.createIndexes(done));

async function consume() {
  for (;;) {
    const message = await asked((done) => queue.get(done));
    if (!message) {
      await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
      continue;
    }
    await handle(message.payload.task);
    await asked((done) => queue.ack(message.ack, done));
  }
}

if (isWorker) for (let index = 0; index < LOOPS; index++) consume();
else
  // As an object: an array would be several messages.
  await publish(
    (task) => asked((done) => queue.add({ task }, done)),
    (tasks) => asked((done) => queue.add(tasks.map((task) => ({ task })), done)),
  );

// BullMQ on Redis: 100 jobs at once in one process; done jobs are removed.
import { Queue, Worker } from "bullmq";
import { handle, isWorker, lease, publish, uri } from "./notes.mjs";

const { hostname, port, pathname } = new URL(uri);
const connection = { host: hostname, port: Number(port), db: Number(pathname.slice(1)), maxRetriesPerRequest: null };

if (isWorker) {
  const worker = new Worker("noop", (job) => handle(job.data.task), {
    connection,
    concurrency: 100,
    removeOnComplete: { count: 0 },
    ...(lease ? { lockDuration: lease * 1000, stalledInterval: lease * 1000 } : {}),
  });
  worker.on("error", (error) => console.error(error));
} else {
  const queue = new Queue("noop", { connection, defaultJobOptions: { removeOnComplete: true } });
  await queue.waitUntilReady();
  await publish(
    (task) => queue.add("noop", { task }),
    (tasks) => queue.addBulk(tasks.map((task) => ({ name: "noop", data: { task } }))),
  );
}

// Agenda on MongoDB: a change stream tells of new jobs; done jobs are removed.
import { Agenda } from "agenda";
import { MongoBackend, MongoChangeStreamNotificationChannel } from "@agendajs/mongo-backend";
import { MongoClient } from "mongodb";
import { handle, isWorker, lease, publish, uri } from "./notes.mjs";

const client = await MongoClient.connect(uri);
const db = client.db();
const agenda = new Agenda({
  backend: new MongoBackend({ mongo: db }),
  notificationChannel: new MongoChangeStreamNotificationChannel({ db }),
  processEvery: 1000,
  // Without a limit it locks a whole backlog first: faster in a drain, but a single new job waits for a second.
  ...(process.env.PEER_TRIAL === "drain" ? {} : { defaultLockLimit: 100 }),
  maxConcurrency: 100,
  defaultConcurrency: 100,
  removeOnComplete: true,
  ...(lease ? { defaultLockLifetime: lease * 1000 } : {}),
});
agenda.on("error", (error) => console.error(error));
agenda.define("noop", async (job) => handle(job.attrs.data));
await agenda.ready;
if (isWorker) await agenda.start();
else await publish((payload) => agenda.now("noop", payload));

// Publish a task to mtask with nothing but the official MongoDB driver, wait for it, and see a malformed one refused.
//
//   node publish.mjs URI DATABASE [KEY] [SECONDS TO WAIT]

import { MongoClient } from "mongodb";

/** The options of a task: all of them, by their document names. These are the defaults; `changes` go on top. */
export function taskOption(changes = {}) {
  return {
    priority: 0,
    concurrent_worker_cnt: 1,
    ping_interval_ms: 30000,
    worker_timeout_ms: 60000,
    specific_worker_ids: [],
    max_unexpected_retries: 3,
    unexpected_retry_delay_ms: 10000,
    retry_backoff: 1,
    retry_max_delay_ms: null,
    retry_scope: "task",
    run_timeout_ms: null,
    retain_success_ms: null,
    retain_fail_ms: null,
    ...changes,
  };
}

/**
 * Publish a task once, from any process and any number of times. Returns its id and whether it is new.
 *
 * The update is an aggregation pipeline, for one reason: only there is the server's clock, $$NOW, at hand.
 * `new Date()` would be this machine's clock. If that is ten minutes fast, the task starts ten minutes late.
 * In a pipeline, text that begins with "$" is an expression, so whatever comes from outside is wrapped in $literal.
 */
export async function publish(tasks, name, key, params, { queue, option = {}, delayMs = 0, lookup, declared } = {}) {
  const literal = (value) => ({ $literal: value });
  const taskId = `${name}:${key}`;
  const startTime = { $add: ["$$NOW", delayMs] };
  const found = { ...takenFrom(params, declared), ...lookup };
  const task = {
    _id: literal(taskId),
    name: literal(name),
    key: literal(key),
    queue: literal(queue ?? declared?.queue ?? "default"),
    params: literal(params),
    task_option: literal(taskOption({ ...declared?.options, ...option })),
    ...(declared ? { declared: declared.hash } : {}),
    ...(declared?.version ? { version: declared.version } : {}),
    ...(Object.keys(found).length > 0 ? { lookup: literal(lookupOf(found)) } : {}),
    task_state: {
      status: "INIT",
      create_time: "$$NOW",
      ...(delayMs > 0 ? { start_time: startTime } : {}),
      next_preempt_time: delayMs > 0 ? startTime : "$$NOW",
      failed_cnt: 0,
      cancel_requested: false,
      worker_states: [],
    },
    schema_version: 1,
  };
  const isNew = { $eq: [{ $type: "$schema_version" }, "missing"] };
  const pipeline = [{ $replaceWith: { $cond: [isNew, task, "$$ROOT"] } }];
  for (let attempt = 1; ; attempt++) {
    try {
      const result = await tasks.updateOne({ _id: taskId }, pipeline, { upsert: true });
      return { taskId, created: result.upsertedCount === 1 };
    } catch (error) {
      // 11000: another publisher inserted it at the same moment. The next try finds its task and leaves it alone.
      if (error.code !== 11000 || attempt === 5) throw error;
    }
  }
}

/** What the handler of this name declares: one read of the collection `handlers`. undefined: none is registered. */
export async function declaredBy(handlers, name) {
  const found = await handlers.findOne({ _id: name });
  return found?.versions.find((version) => version.hash === found.current);
}

/** The lookups that a handler takes from these params. */
function takenFrom(params, declared) {
  const isObject = params !== null && typeof params === "object" && !Array.isArray(params);
  const given = isObject ? params : { [declared?.sole]: params };
  const names = (declared?.lookup ?? []).filter((name) => given[name] !== undefined && given[name] !== null);
  return Object.fromEntries(names.map((name) => [name, given[name]]));
}

/** Lookups in their stored form: { user_id: 7, tags: ["a", "b"] } becomes one pair for each value. */
export function lookupOf(values) {
  return Object.entries(values).flatMap(([k, v]) => [v].flat().map((one) => ({ k, v: one })));
}

/** The newest tasks that have these lookups, by the index mtask_lookup. $elemMatch keeps k and v of one pair together. */
export function find(tasks, values, limit = 100) {
  const $and = lookupOf(values).map((pair) => ({ lookup: { $elemMatch: pair } }));
  return tasks
    .find({ lookup: { $exists: true }, $and })
    .sort({ "task_state.create_time": -1, _id: -1 })
    .limit(limit)
    .hint("mtask_lookup")
    .toArray();
}

/** Read the task until it is SUCCESS, FAIL or CANCELED, and return it. */
export async function wait(tasks, taskId, timeoutMs) {
  const end = performance.now() + timeoutMs;
  for (let pause = 10; ; pause = Math.min(pause * 1.5, 500)) {
    const task = await tasks.findOne({ _id: taskId });
    if (task === null) throw new Error(`there is no task ${taskId}`);
    const { status, worker_states: runs } = task.task_state;
    const owesValue = status === "SUCCESS" && runs.some((run) => run.returns_owed_by && !run.past);
    if (["SUCCESS", "FAIL", "CANCELED"].includes(status) && !owesValue) return task;
    if (performance.now() >= end) throw new Error(`task ${taskId} is still ${status}`);
    await new Promise((resolve) => setTimeout(resolve, pause));
  }
}

/** What the last run that succeeded returned; undefined if none has. */
export function returnsOf(task) {
  return task.task_state.worker_states.filter((run) => run.status === "SUCCESS" && !run.past).at(-1)?.returns;
}

async function main(uri, database, key = "welcome/42", seconds = "0") {
  const client = new MongoClient(uri);
  try {
    // A task that is acknowledged must survive the loss of the primary.
    const tasks = client.db(database).collection("tasks", { writeConcern: { w: "majority" } });

    const params = { to: "ada@example.com", subject: "$9.99 off" };
    console.log(JSON.stringify(await publish(tasks, "send_email", key, params, { queue: "mail", option: { priority: 5 } })));

    // The validator refuses what no worker could run: error 121, and in its details which rule was broken.
    try {
      await publish(tasks, "send_email", `${key}/malformed`, params, { option: { worker_timeout_ms: "a minute" } });
    } catch (error) {
      if (error.code !== 121) throw error;
      console.log(JSON.stringify({ code: error.code, message: error.errmsg, details: error.errInfo?.details }));
    }

    if (Number(seconds) > 0) {
      const task = await wait(tasks, `send_email:${key}`, Number(seconds) * 1000);
      console.log(JSON.stringify({ status: task.task_state.status, returns: returnsOf(task) }));
    }
  } finally {
    await client.close();
  }
}

if (process.argv[1]?.endsWith("publish.mjs")) {
  if (process.argv.length < 4) {
    console.error("usage: node publish.mjs URI DATABASE [KEY] [SECONDS TO WAIT]");
    process.exit(2);
  }
  await main(...process.argv.slice(2));
}

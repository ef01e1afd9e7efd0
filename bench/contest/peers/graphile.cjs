// graphile-worker: a table, polled; a NOTIFY tells of new jobs that are due; node.js.
//
// Settings: what its page on performance gives for throughput: `concurrentJobs` 24, `maxPoolSize` 25, `localQueue` of 500,
// and completions in batches without delay; `pollInterval`, of which its lateness consists, at 10 ms instead of 2 s; no
// log line for each job. `addJobs` is its call for many. After a crash a job comes back after four hours, which cannot be
// set.
//
// `produce` schedules; `work` runs a worker; `setup` makes its tables.
"use strict";

const { Logger, makeWorkerUtils, run } = require("graphile-worker");
const { handler, produce } = require("./client.cjs");

const logger = new Logger(() => (level, message) => {
  if (level === "error" || level === "warning") console.error(message);
});
const preset = {
  worker: {
    connectionString: process.env.BENCH_URL,
    concurrentJobs: 24,
    maxPoolSize: 25,
    pollInterval: 10,
    localQueue: { size: 500 },
    completeJobBatchDelay: 0,
    failJobBatchDelay: 0,
    logger,
  },
};

async function setUp() {
  const utils = await makeWorkerUtils({ preset });
  await utils.migrate();
  await utils.release();
}

async function work() {
  const handle = handler();
  const runner = await run({ preset, taskList: { task: ({ data }) => handle(data) } });
  await runner.promise;
}

async function schedule() {
  const utils = await makeWorkerUtils({ preset });
  const job = ([data, due]) => ({ identifier: "task", payload: { data }, runAt: new Date(due) });
  await produce(
    (data, due) => utils.addJob("task", { data }, { runAt: new Date(due) }),
    (items) => utils.addJobs(items.map(job)),
  );
  await utils.release();
  process.exit(0);
}

const done = { work, setup: setUp }[process.argv[2]] ?? schedule;
done().catch((error) => {
  console.error(error);
  process.exit(1);
});

// BullMQ: a sorted set of delayed jobs with a marker that says when the next is due; node.js.
//
// Settings: `concurrency` 50, as in its guide; `removeOnComplete` and
// `removeOnFail`, since nobody reads results; `addBulk` is its call for many. After a crash a job comes back when its
// lock (`lockDuration`) has ended and the check for stalled jobs (`stalledInterval`) has come round; both are set to the
// lease for `crash`.
//
// `produce` schedules; `work` runs a worker.
"use strict";

const { Queue, Worker } = require("bullmq");
const { handler, produce } = require("./client.cjs");

const NAME = "bench";
const url = new URL(process.env.BENCH_URL);
const connection = {
  host: url.hostname,
  port: Number(url.port || 6379),
  db: Number(url.pathname.slice(1) || 0),
  username: decodeURIComponent(url.username) || undefined,
  password: decodeURIComponent(url.password) || undefined,
  maxRetriesPerRequest: null,
};

function work() {
  const handle = handler();
  const lease = process.env.BENCH_LEASE ? Number(process.env.BENCH_LEASE) * 1000 : undefined;
  const options = { connection, concurrency: 50, ...(lease && { lockDuration: lease, stalledInterval: lease }) };
  const worker = new Worker(NAME, (job) => handle(job.data), options);
  worker.on("error", (error) => console.error(error));
  process.on("SIGTERM", () => worker.close().then(() => process.exit(0)));
}

async function schedule() {
  const queue = new Queue(NAME, { connection, defaultJobOptions: { removeOnComplete: true, removeOnFail: true } });
  await queue.waitUntilReady();
  const delayed = (due) => ({ delay: Math.max(0, due - Date.now()) });
  await produce(
    (data, due) => queue.add("task", data, delayed(due)),
    (items) => queue.addBulk(items.map(([data, due]) => ({ name: "task", data, opts: delayed(due) }))),
  );
  await queue.close();
  process.exit(0);
}

if (process.argv[2] === "work") work();
else schedule();

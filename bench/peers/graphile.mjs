// graphile-worker, with the settings of its page on performance: a local queue of 500 jobs, and ended jobs written down
// in batches without a delay. `concurrentJobs` is the number of places.
//
//     node bench/peers/graphile.mjs FOLDER URL PLACES SINGLES TASKS
//
// FOLDER is where npm installed it. The rest, and the answer, are those of measure.py.

import { createRequire } from "node:module";
import { performance } from "node:perf_hooks";
import { setTimeout as sleep } from "node:timers/promises";

const [folder, url, ...numbers] = process.argv.slice(2);
const [places, singles, tasks] = numbers.map(Number);
const require = createRequire(`${folder}/`);
const { Logger, makeWorkerUtils, run } = require("graphile-worker");
const { version } = require("graphile-worker/package.json");
const { Pool } = require("pg");

const BULK = 1000;
const LOOK = 2;
const payload = { text: "hello" };

async function main() {
  const logger = new Logger(() => () => {});
  const pgPool = new Pool({ connectionString: url, max: Math.min(places, 20) + 3 });
  pgPool.on("error", () => {});
  pgPool.on("connect", (client) => client.on("error", () => {}));
  const utils = await makeWorkerUtils({ pgPool, logger });
  await utils.migrate();

  let start = performance.now();
  await produce(() => utils.addJob("noop", payload));
  const enqueue = rate(singles, start);

  start = performance.now();
  for (let done = singles; done < tasks; done += BULK) {
    const count = Math.min(BULK, tasks - done);
    await utils.addJobs(Array.from({ length: count }, () => ({ identifier: "noop", payload })));
  }
  const bulk = rate(tasks - singles, start);

  await pgPool.query("vacuum analyze");

  let left = tasks;
  let over;
  const ended = new Promise((resolve) => (over = resolve));
  const noop = async () => {
    if (--left === 0) over();
  };

  start = performance.now();
  const runner = await run({
    pgPool,
    logger,
    noHandleSignals: true,
    taskList: { noop },
    preset: {
      worker: {
        concurrentJobs: places,
        localQueue: { size: 500, refetchDelay: { durationMs: 10 } },
        completeJobBatchDelay: 0,
        failJobBatchDelay: 0,
      },
    },
  });
  await ended;
  while (!(await recorded(pgPool))) await sleep(LOOK);
  const execute = rate(tasks, start);

  await runner.stop();
  await utils.release();
  await pgPool.end();
  console.log(JSON.stringify({ version, enqueue, bulk, execute }));
}

async function produce(enqueue) {
  let rest = singles;
  const producer = async () => {
    while (rest-- > 0) await enqueue();
  };
  await Promise.all(Array.from({ length: places }, producer));
}

async function recorded(pgPool) {
  const { rows } = await pgPool.query("select not exists (select from graphile_worker._private_jobs) as over");
  return rows[0].over;
}

function rate(count, start) {
  return (count * 1000) / (performance.now() - start);
}

await main();

// The pages by the name in their address, and the entries of the navigation.

import { auditPage, deployPage, jobsPage } from "./page-records.js";
import { deadPage, effectsPage } from "./page-effects.js";
import { errorsPage } from "./page-errors.js";
import { flowPage, taskPage, workPage } from "./page-work.js";
import { moneyPage, nowPage, queuesPage, workersPage } from "./page-system.js";
import { schedulesPage, timersPage } from "./page-time.js";
import { stagesPage } from "./page-stages.js";
import { worldsPage } from "./page-worlds.js";

export const TITLES = {
  now: "Now",
  work: "Work",
  worlds: "Worlds",
  effects: "Effects",
  errors: "Errors",
  dead: "Dead letters",
  schedules: "Schedules",
  timers: "Timers",
  queues: "Queues and limits",
  money: "Money",
  workers: "Workers",
  stages: "Stages",
  jobs: "Jobs",
  deploy: "Deploy",
  audit: "Audit",
};

export const PAGES = {
  now: nowPage,
  work: workPage,
  tasks: taskPage,
  flows: flowPage,
  worlds: worldsPage,
  effects: effectsPage,
  errors: errorsPage,
  dead: deadPage,
  schedules: schedulesPage,
  timers: timersPage,
  queues: queuesPage,
  money: moneyPage,
  workers: workersPage,
  stages: stagesPage,
  jobs: jobsPage,
  deploy: deployPage,
  audit: auditPage,
};

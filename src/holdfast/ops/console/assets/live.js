// The event stream of the page: one connection to the server, that reconnects with `Last-Event-ID`.

import { parseJson, place } from "./api.js";

const HIDDEN_MS = 60_000;
const RETRY_MS = [1_000, 2_000, 4_000];

export class Live {
  // `onState` gets "live", "waiting" or "lost". `onRefused` is called when the server refuses the stream; it returns whether
  // the subject of the page is missing.
  constructor(onState, onRefused) {
    this.onState = onState;
    this.onRefused = onRefused;
    this.source = null;
    this.failures = 0;
    this.timer = null;
    this.hiddenTimer = null;
    document.addEventListener("visibilitychange", () => this.#visible());
    window.addEventListener("online", () => this.#reopen(true));
  }

  // Stream a subject, and readiness and counts. `onEvent` gets the name of an event and its document.
  open(subject, onEvent) {
    this.subject = subject;
    this.onEvent = onEvent;
    this.failures = 0;
    this.#reopen(false);
  }

  close() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
    this.subject = undefined;
  }

  #url() {
    const main = this.subject || "counts";
    const also = this.subject ? "readiness,counts" : "readiness";
    const parameters = new URLSearchParams({ subject: main, also });
    if (place.universe) parameters.set("universe", place.universe);
    return `/v1/events?${parameters}`;
  }

  #reopen(resets) {
    if (this.subject === undefined) return;
    clearTimeout(this.timer);
    this.source?.close();
    if (document.hidden) {
      this.source = null;
      return;
    }
    if (resets) this.failures = 0;
    const source = new EventSource(this.#url());
    this.source = source;
    const names = ["readiness", "counts", "gone", this.subject.split("/")[0]];
    for (const name of new Set(names)) {
      if (name) source.addEventListener(name, (event) => this.#event(source, name, event));
    }
    source.onopen = () => {
      this.failures = 0;
      this.onState("live");
    };
    source.onerror = () => {
      if (source !== this.source) return;
      this.onState(this.failures > 2 ? "lost" : "waiting");
      this.failures += 1;
      // A browser gives up after an answer other than 200.
      if (source.readyState === EventSource.CLOSED) {
        const delay = RETRY_MS[Math.min(this.failures - 1, RETRY_MS.length - 1)];
        this.timer = setTimeout(() => this.#reopen(false), delay);
        this.#refused(this.subject);
      }
    };
  }

  // The browser hides the status of the answer.
  async #refused(subject) {
    if (await this.onRefused(subject) && this.subject === subject) this.subject = "";
  }

  #event(source, name, event) {
    if (source !== this.source) return;
    this.onState("live");
    if (name === "gone") {
      this.subject = "";
      this.onEvent("gone", {});
      this.#reopen(true);
      return;
    }
    this.onEvent(name, parseJson(event.data));
  }

  // A hidden page gives its connection back.
  #visible() {
    clearTimeout(this.hiddenTimer);
    if (document.hidden) {
      this.hiddenTimer = setTimeout(() => {
        this.source?.close();
        this.source = null;
      }, HIDDEN_MS);
    } else if (this.source === null && this.subject !== undefined) {
      this.#reopen(true);
    }
  }
}

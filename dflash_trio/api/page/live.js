// The status as it changes: one stream, opened again whenever it ends, and what to say meanwhile.

import { ServerError, call, events, hasKey } from "./server.js";

const SILENCE = 40_000; // ms: the server sends something every 15 s
const SOONEST = 1_000, LATEST = 15_000; // ms between two attempts

export class Live {
  #attempt = 0;
  #drained = false;
  #running = null; // AbortController of the stream that is read
  #wake = () => {};

  /**
   * keyed: whether the server wants a key. onStatus(status): a new one. onState(state, text): how
   * the connection is; live, loading, draining, locked, busy, connecting or away.
   */
  constructor({ keyed, onStatus, onState }) {
    Object.assign(this, { keyed, onStatus, onState });
    // A page that nobody sees needs no stream, and there are only so many.
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) this.#running?.abort();
      else this.retry();
    });
  }

  /** Try at once: for a button, and when there is a new key. */
  retry() {
    this.#attempt = 0;
    this.#wake();
  }

  async run() {
    for (;;) {
      if (document.hidden) {
        await this.#pause(null);
      } else if (this.keyed && !hasKey()) {
        this.onState("locked", "A key is needed");
        await this.#pause(null);
      } else {
        await this.#pause(await this.#follow());
      }
    }
  }

  /** Read one stream to its end; the milliseconds to wait then, null for until told. */
  async #follow() {
    this.#running = new AbortController();
    const watchdog = new Watchdog(() => this.#running.abort());
    try {
      const response = await call("status/stream", {
        accept: "text/event-stream",
        signal: this.#running.signal,
      });
      for await (const { name, data } of events(response)) {
        watchdog.feed();
        this.#attempt = 0;
        this.#drained = name === "draining";
        if (this.#drained) {
          this.onState("draining", "The server is shutting down: it takes nothing new");
          // What has begun may go on for long; the status is over.
          return 2 * SOONEST;
        }
        this.onState("live", "Live");
        this.onStatus(JSON.parse(data));
      }
      return this.#away();
    } catch (error) {
      return error instanceof ServerError ? this.#refused(error) : this.#away();
    } finally {
      watchdog.stop();
      this.#running.abort();
      this.#running = null;
    }
  }

  #refused(error) {
    if (error.status === 401) {
      this.keyed = true;
      this.onState("locked", hasKey() ? "The server does not take this key" : "A key is needed");
      return null;
    }
    if (error.code === "model_loading") {
      this.onState("loading", "The models are loading");
      return 2 * SOONEST;
    }
    if (error.code === "server_shutting_down") {
      this.#drained = true;
      this.onState("draining", "The server is shutting down: it takes nothing new");
      return 2 * SOONEST;
    }
    this.onState("busy", error.message);
    return Math.max(SOONEST, 1000 * (error.retryAfter || 5));
  }

  #away() {
    if (document.hidden) return null;
    const delay = Math.min(LATEST, SOONEST * 2 ** this.#attempt++);
    const what = this.#drained ? "The server has shut down" : "The server cannot be reached";
    this.onState("away", `${what}. Trying again every ${delay / 1000} s`);
    return delay;
  }

  /** Wait, in milliseconds; null: until somebody calls retry(). */
  #pause(delay) {
    return new Promise((resolve) => {
      const timer = delay === null ? null : setTimeout(resolve, delay);
      this.#wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }
}

/** Calls back once nobody has fed it for too long. */
class Watchdog {
  constructor(bite) {
    this.bite = bite;
    this.feed();
  }
  feed() {
    clearTimeout(this.timer);
    this.timer = setTimeout(this.bite, SILENCE);
  }
  stop() {
    clearTimeout(this.timer);
  }
}

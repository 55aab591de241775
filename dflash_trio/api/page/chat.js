// A conversation with whichever model answers, and which one that was and why.

import { $, count, el, seconds, setText } from "./dom.js";
import { call, events } from "./server.js";

const WHY = {
  busy: "the primary was busy",
  room: "it does not fit the primary",
  unhealthy: "the primary is unhealthy",
};
const CUT = {
  server_shutdown: "ended by the server's shutdown",
  no_free_cells: "ended: the KV cells were used up",
  context_full: "ended: the context is full",
};

/** Why this model answered, from an answer's headers. */
export function whyText(headers) {
  const waited = Number(headers.get("x-dflash-waited"));
  const reason = WHY[headers.get("x-dflash-fallback")];
  const parts = [];
  if (waited > 0) parts.push(`waited ${seconds(waited)}`);
  if (reason) parts.push(`fallback: ${reason}`);
  else parts.push(waited > 0 ? "then the primary" : "primary");
  return parts.join(", ");
}

export class Chat {
  #turns = []; // what the next request sends
  #running = null; // AbortController of the answer under way
  #routing = null;

  constructor() {
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        $("ask").requestSubmit();
      }
    });
    $("stop").addEventListener("click", () => this.#running?.abort());
    $("clear").addEventListener("click", () => this.#clear());
  }

  /** What the status says, for those who wait. */
  show({ routing }) {
    this.#routing = routing;
  }

  async #ask() {
    const text = $("prompt").value.trim();
    if (!text || this.#running) return;
    $("prompt").value = "";
    this.#turns.push({ role: "user", content: text });
    this.#add("user", "You").body.textContent = text;
    const answer = this.#add("assistant", "Model");
    this.#running = new AbortController();
    this.#showButtons();
    const waiting = this.#tellWaiting(answer);
    try {
      await this.#stream(answer, waiting);
    } catch (error) {
      this.#failed(answer, error);
    } finally {
      clearInterval(waiting);
      this.#running = null;
      this.#showButtons();
      answer.item.removeAttribute("aria-busy");
      if (document.activeElement === document.body) $("prompt").focus();
    }
  }

  async #stream(answer, waiting) {
    const began = performance.now();
    const response = await call("v1/chat/completions", {
      body: { messages: this.#turns, stream: true, stream_options: { include_usage: true } },
      accept: "text/event-stream",
      signal: this.#running.signal,
    });
    clearInterval(waiting);
    const notes = [whyText(response.headers)];
    setText(answer.note, notes.join(" · "));
    let ended = null;
    for await (const { data } of events(response)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      setText(answer.who, chunk.model);
      const choice = chunk.choices[0];
      if (choice?.delta.reasoning_content) this.#think(answer, choice.delta.reasoning_content);
      if (choice?.delta.content) {
        if (!answer.said) notes.push(`first token after ${seconds((performance.now() - began) / 1000)}`);
        answer.said += choice.delta.content;
        answer.body.append(choice.delta.content);
        follow();
      }
      if (choice?.finish_reason) ended = choice.finish_reason;
      if (chunk.usage) {
        notes.push(`${count(chunk.usage.completion_tokens)} tokens`);
        const cut = CUT[chunk.usage.completion_tokens_details?.ended_by];
        if (cut || ended === "length") notes.push(cut ?? "cut at its limit of tokens");
      }
    }
    if (ended === null) throw new Error("The connection ended before the answer did.");
    setText(answer.note, notes.join(" · "));
    follow();
    this.#turns.push({ role: "assistant", content: answer.said });
    setText($("announcement"), `${answer.who.textContent} answered: ${answer.said}`);
  }

  /** While no model has answered yet. */
  #tellWaiting(answer) {
    const began = performance.now();
    const tell = () => {
      const passed = (performance.now() - began) / 1000;
      if (passed < 1) return setText(answer.note, "Asking");
      const line = this.#routing?.waiting
        ? `${this.#routing.waiting} of ${this.#routing.waiting_limit} waiting` : "no token yet";
      setText(answer.note, `${Math.floor(passed)} s, ${line}`);
    };
    tell();
    return setInterval(tell, 500);
  }

  #failed(answer, error) {
    const stopped = error.name === "AbortError";
    const lost = error instanceof TypeError; // fetch's word for no answer at all
    const text = stopped ? "Stopped" : lost ? "The server cannot be reached." : error.message;
    if (stopped && answer.said) {
      // The conversation goes on from what there is.
      this.#turns.push({ role: "assistant", content: answer.said });
      setText(answer.note, `${answer.note.textContent} · stopped`);
    } else {
      this.#turns.pop();
      setText(answer.note, text);
    }
    if (!stopped) answer.item.classList.add("failed");
    setText($("announcement"), text);
    if (!$("prompt").value) $("prompt").value = stopped ? "" : this.#lastQuestion(answer);
  }

  /** Given back for another try. */
  #lastQuestion(answer) {
    return answer.item.previousElementSibling?.querySelector(".body").textContent ?? "";
  }

  #think(answer, text) {
    if (!answer.thinking) {
      answer.thinking = el("div", { class: "body" });
      answer.body.before(el("details", {}, el("summary", {}, "Thinking"), answer.thinking));
    }
    answer.thinking.append(text);
  }

  #add(role, name) {
    const who = el("h3", {}, name);
    const body = el("div", { class: "body" });
    const note = el("p", { class: "note" });
    const item = el("li", { class: role, "aria-busy": role === "assistant" ? "true" : null }, who, body, note);
    $("messages").hidden = false;
    $("messages").append(item);
    $("messages").scrollTop = $("messages").scrollHeight;
    return { item, who, body, note, thinking: null, said: "" };
  }

  #clear() {
    this.#running?.abort();
    this.#turns = [];
    $("messages").replaceChildren();
    $("messages").hidden = true;
    this.#showButtons();
    $("prompt").focus();
  }

  #showButtons() {
    const busy = this.#running !== null;
    if (busy && document.activeElement === $("send")) $("prompt").focus();
    if (!busy && document.activeElement === $("stop")) $("prompt").focus();
    $("send").disabled = busy;
    $("stop").hidden = !busy;
    $("clear").hidden = $("messages").hidden;
  }
}

/** Keep the end in sight for who is looking at it. */
function follow() {
  const list = $("messages");
  if (list.scrollHeight - list.scrollTop - list.clientHeight < 80) list.scrollTop = list.scrollHeight;
}

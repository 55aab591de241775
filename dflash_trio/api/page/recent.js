// The latest requests that wanted an answer.

import { $, age, count, el, seconds, setText } from "./dom.js";

const COLUMNS = ["Ended", "Model", "Outcome", "Route", "Waited", "First token", "Total", "Tokens"];
const ROUTES = {
  "/v1/chat/completions": "chat",
  "/v1/completions": "completion",
  "/v1/messages": "messages",
  "/v1/responses": "responses",
};
const KINDS = { completed: "good", cancelled: "", refused: "warn", unavailable: "warn", failed: "bad" };

export class Recent {
  #table = document.querySelector("#recent table");
  #shown = "";
  #requests = [];
  #ages = [];
  #ahead = 0; // seconds that the server's clock is before ours

  constructor() {
    const row = this.#table.querySelector("thead tr");
    row.append(...COLUMNS.map((name) => el("th", { role: "columnheader", scope: "col" }, name)));
    setInterval(() => this.#showAges(), 5_000);
  }

  show({ recent_requests: requests, taken_at: now }) {
    const ids = requests.map((request) => `${request.request_id} ${request.ended_at}`).join("\n");
    if (ids !== this.#shown) this.#fill(requests);
    this.#shown = ids;
    this.#ahead = now - Date.now() / 1000;
    this.#showAges();
  }

  #showAges() {
    const now = Date.now() / 1000 + this.#ahead;
    this.#ages.forEach((cell, i) => setText(cell, age(now - this.#requests[i].ended_at)));
  }

  #fill(requests) {
    $("recent-none").hidden = requests.length > 0;
    this.#table.hidden = requests.length === 0;
    const rows = requests.map((request) => this.#row(request));
    this.#table.querySelector("tbody").replaceChildren(...rows);
    this.#requests = requests;
    this.#ages = rows.map((row) => row.firstChild);
  }

  #row(request) {
    const out = request.completion_tokens === null ? ""
      : `, ${count(request.completion_tokens)} out`;
    const tokens = request.prompt_tokens === null ? "–" : `${count(request.prompt_tokens)} in${out}`;
    const outcome = request.status === null || request.outcome === "completed"
      ? request.outcome : `${request.outcome} (${request.status})`;
    const cells = [
      "", (request.model ?? "–") + (request.fallback ? ` (fallback: ${request.fallback})` : ""),
      el("span", { class: `badge ${KINDS[request.outcome] ?? ""}` }, outcome),
      ROUTES[request.route] ?? request.route,
      seconds(request.queue_s), seconds(request.ttft_s), seconds(request.total_s), tokens,
    ];
    return el("tr", { role: "row", title: request.request_id },
      ...cells.map((cell, i) => el("td", { role: "cell", "data-label": COLUMNS[i] }, cell)));
  }
}

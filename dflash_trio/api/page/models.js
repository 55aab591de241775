// The models in priority order, and the queue: built once, then filled with each status.

import { $, bar, count, el, percent, setText } from "./dom.js";

const WINDOW = 3; // seconds that a rate looks back

/** Tokens per second, from totals of a model at several moments. */
class Rate {
  #seen = [];

  /** The rate up to now; 0 for a model that does nothing. */
  add(at, total, working) {
    const last = this.#seen.at(-1);
    if (!working || (last && (total < last.total || at < last.at))) this.#seen = [];
    this.#seen.push({ at, total });
    while (this.#seen.length > 2 && this.#seen[1].at < at - WINDOW) this.#seen.shift();
    const first = this.#seen[0];
    return at > first.at ? (total - first.total) / (at - first.at) : 0;
  }
}

class ModelCard {
  #prefill = new Rate();
  #decode = new Rate();
  #slots = bar("reserved");
  #cells = bar("cached", "committed", "used");
  #badges = el("p", { class: "badges" });
  #texts = Object.fromEntries(
    ["place", "slots", "rate", "draft", "reason"].map((name) => [name, el("p", { class: name })]),
  );
  #counts = Object.fromEntries(
    ["committed", "used", "cached"].map((name) => [name, el("span", { class: `key ${name}` })]),
  );

  constructor(model) {
    const { place, slots, rate, draft, reason } = this.#texts;
    const cells = el("p", { class: "cells" }, "KV cells: ", ...Object.values(this.#counts));
    this.element = el("li", { class: "card" },
      el("h3", {}, model.name), this.#badges, reason, place,
      slots, this.#slots.element, cells, this.#cells.element, rate, draft);
  }

  show(model, at) {
    const { slots, kv_pool: pool, in_flight: flight, engine } = model;
    this.#showBadges(model);
    const text = {
      reason: model.health.reason ?? "",
      place: placeText(model),
      slots: `Slots: ${slots.reserved} of ${slots.total} reserved${phases(flight, model.paused)}`,
      draft: draftText(model.draft),
    };
    const working = Object.values(flight).some((n) => n > 0);
    const decode = this.#decode.add(at, engine.completion_tokens, working);
    const prefill = this.#prefill.add(at, engine.prompt_tokens, working);
    text.rate = working
      ? `${decode.toFixed(1)} tokens/s out, ${prefill.toFixed(0)} tokens/s in`
      : `Idle. So far ${count(engine.completion_tokens)} tokens out, ${count(engine.prompt_tokens)} in`;
    for (const [name, line] of Object.entries(this.#texts)) {
      setText(line, text[name]);
      line.hidden = !text[name];
    }
    setText(this.#counts.committed, `${count(pool.committed)} of ${count(pool.total)} committed, `);
    setText(this.#counts.used, `${count(pool.used)} used, `);
    setText(this.#counts.cached, `${count(pool.cached)} cached`);
    this.#slots.show(slots.total, slots.reserved);
    this.#cells.show(pool.total, pool.cached, pool.committed, pool.used);
  }

  #showBadges(model) {
    const badges = [
      [model.primary ? "primary" : `fallback ${model.priority}`, model.primary ? "accent" : ""],
      model.health.healthy ? ["healthy", "good"] : ["unhealthy", "bad"],
      [model.drains ? "drains at shutdown" : "ends answers at shutdown", ""],
    ];
    const wanted = badges.map(([text]) => text).join();
    if (this.#badges.dataset.shown === wanted) return;
    this.#badges.dataset.shown = wanted;
    this.#badges.replaceChildren(
      ...badges.map(([text, kind]) => el("span", { class: `badge ${kind}` }, text)));
  }
}

function placeText({ placement, architecture, max_ctx: room }) {
  const layers = placement.gpu_layers ? `, ${placement.gpu_layers} layers on the GPU` : "";
  const draft = placement.draft_device ? `, draft on ${placement.draft_device}` : "";
  return `${architecture} on ${placement.target_device}${layers}${draft}, `
    + `${placement.threads} ${placement.threads === 1 ? "thread" : "threads"}, `
    + `context of ${count(room)} tokens`;
}

const PHASES = { prefill: "in prefill", decode: "decoding", draining: "being sent", paused: "paused" };

function phases(flight, paused) {
  const parts = Object.entries({ ...flight, paused })
    .filter(([name, n]) => n > 0 && name in PHASES)
    .map(([name, n]) => `${n} ${PHASES[name]}`);
  return parts.length ? ` (${parts.join(", ")})` : "";
}

function draftText(draft) {
  if (!draft?.kind) return "";
  const parts = [draft.acceptance === null ? "no guess yet" : `${percent(draft.acceptance)} accepted`];
  if (draft.state && draft.state !== "awake") parts.unshift(draft.state.replace("-", " "));
  if (draft.proposed) parts.push(`${count(draft.accepted)} of ${count(draft.proposed)} tokens`);
  if (draft.committed_per_step) parts.push(`${draft.committed_per_step.toFixed(2)} tokens a step`);
  return `Draft (${draft.kind}): ${parts.join(", ")}`;
}

export class Models {
  #cards = new Map();
  #line = el("p");
  #bar = bar("waiting");

  constructor() {
    $("queue").append(el("h3", {}, "Waiting line"), this.#line, this.#bar.element);
  }

  show({ models, routing, unused_models: unused, taken_at: at }) {
    const names = models.map((model) => model.name);
    if (names.join("\n") !== [...this.#cards.keys()].join("\n")) {
      this.#cards = new Map(models.map((model) => [model.name, new ModelCard(model)]));
      $("models").replaceChildren(...[...this.#cards.values()].map((card) => card.element));
    }
    for (const model of models) this.#cards.get(model.name).show(model, at);
    $("queue").hidden = false;
    const preparing = routing.preparing ? `, ${routing.preparing} in preparation` : "";
    const idle = unused?.length ? `. Configured and not loaded: ${unused.join(", ")}` : "";
    setText(this.#line, `${routing.waiting} of ${routing.waiting_limit} waiting${preparing}${idle}`);
    this.#bar.show(routing.waiting_limit, routing.waiting);
  }
}

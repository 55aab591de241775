// Building elements, and words for numbers. Text goes in as text: nothing here parses HTML.

export const $ = (id) => document.getElementById(id);

/** An element with attributes (null leaves one out) and children, which are nodes or texts. */
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** Set a text only where it differs, so that nothing is announced or painted twice. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

const whole = new Intl.NumberFormat("en");
export const count = (number) => whole.format(number);
export const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

/** Seconds in words, as exact as one can use them. */
export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 0.0005) return "0 s";
  if (value < 1) return `${Math.max(1, Math.round(1000 * value))} ms`;
  if (value < 100) return `${value.toFixed(1)} s`;
  return `${count(Math.round(value))} s`;
}

export function age(value) {
  if (value < 1.5) return "just now";
  if (value < 90) return `${Math.round(value)} s ago`;
  if (value < 5400) return `${Math.round(value / 60)} min ago`;
  return `${Math.round(value / 3600)} h ago`;
}

/** A bar of parts of a whole. Only for the eye: whoever makes it says the same in words. */
export function bar(...kinds) {
  const parts = kinds.map((kind) => el("span", { class: kind }));
  const element = el("div", { class: "bar", "aria-hidden": "true" }, ...parts);
  const show = (total, ...values) => {
    values.forEach((value, i) => {
      parts[i].style.width = `${total > 0 ? Math.min(100, (100 * value) / total) : 0}%`;
    });
  };
  return { element, show };
}

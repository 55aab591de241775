// Calls to the server this page came from: the key, errors, and streams of events.

const STORED = "dflash-key";
let key = sessionStorage.getItem(STORED);

export const hasKey = () => key !== null;

/** Use a key from now on, for as long as this tab lives; null forgets it. */
export function setKey(value) {
  key = value;
  if (value === null) sessionStorage.removeItem(STORED);
  else sessionStorage.setItem(STORED, value);
}

/** An answer that is no good one. */
export class ServerError extends Error {
  constructor(status, error, retryAfter) {
    super(error?.message ?? `The server answered ${status}.`);
    this.status = status;
    this.code = error?.code ?? null;
    /** Seconds. */
    this.retryAfter = retryAfter;
  }
}

/** Ask for a path beside this page. Throws ServerError, TypeError when there is no answer at all. */
export async function call(path, { body, accept = "application/json", signal } = {}) {
  const headers = { accept };
  if (key !== null) {
    // Headers carry bytes: those of the key in UTF-8, each as one character.
    headers.authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}`;
  }
  if (body !== undefined) headers["content-type"] = "application/json";
  const response = await fetch(new URL(path, document.baseURI), {
    method: body === undefined ? "GET" : "POST",
    body: body === undefined ? undefined : JSON.stringify(body),
    headers,
    signal,
    cache: "no-store",
    credentials: "omit",
    redirect: "error",
  });
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  throw new ServerError(response.status, told?.error, Number(response.headers.get("retry-after")));
}

/** The events of a stream as {name, data}, data still as text. Ends with the stream. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        let name = "message";
        const data = [];
        for (const line of block.split("\n")) {
          if (line.startsWith("event: ")) name = line.slice(7);
          else if (line.startsWith("data: ")) data.push(line.slice(6));
        }
        if (data.length) yield { name, data: data.join("\n") };
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

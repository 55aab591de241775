// Puts the page together.

import { Chat } from "./chat.js";
import { $, setText } from "./dom.js";
import { Live } from "./live.js";
import { Models } from "./models.js";
import { Recent } from "./recent.js";
import { hasKey, setKey } from "./server.js";

const views = [new Models(), new Recent(), new Chat()];

const live = new Live({
  keyed: document.documentElement.dataset.keyed === "true",
  onStatus: (status) => views.forEach((view) => view.show(status)),
  onState(state, text) {
    setText($("connection"), text);
    $("connection").dataset.state = state;
    document.body.dataset.state = state;
    $("retry").hidden = !["away", "busy", "draining"].includes(state);
    $("forget").hidden = !hasKey();
    const asks = state === "locked";
    if (asks && $("key").hidden) {
      setText($("key-note"), hasKey()
        ? "The server does not take this key. It is kept for this tab only."
        : "This server wants a key. It is kept for this tab only.");
      $("key").hidden = false;
      $("key-value").focus();
    }
    if (!asks) $("key").hidden = true;
  },
});

$("retry").addEventListener("click", () => live.retry());
$("forget").addEventListener("click", () => {
  setKey(null);
  location.reload();
});
$("key").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey($("key-value").value);
  $("key-value").value = "";
  $("key").hidden = true;
  $("prompt").focus();
  live.retry();
});

live.run();

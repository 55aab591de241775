"""``python llama_tokens.py MODEL.gguf``: JSON texts on standard input, their tokens on output."""

import json
import sys

import llama_cpp

model = llama_cpp.Llama(sys.argv[1], vocab_only=True, verbose=False)
add_bos = model.metadata.get("tokenizer.ggml.add_bos_token", "true") == "true"
texts = json.load(sys.stdin)
json.dump([model.tokenize(t.encode(), add_bos=add_bos, special=True) for t in texts], sys.stdout)

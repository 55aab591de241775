"""scripts/train-draft: a DFlash draft for a llama-architecture target, trained on its own answers.

``source`` reads the target's GGUF; ``target`` runs it in torch; ``prompts`` (from ``words``) and
``tokenizer`` make chats of it, ``generate`` lets the target answer them, ``dataset`` keeps the
answers and the layer inputs that a draft sees. ``draft`` is the model, ``head`` its loss,
``optimizer`` and ``train`` move it, ``evaluate`` plays the served loop, ``export`` writes the GGUF;
``start`` reads one to begin with.

It runs in an interpreter of the user's that has torch, not in the project's own environment, so it
uses the standard library, numpy, jinja2 (a dependency of torch) and gguf, and nothing of
``dflash_trio``. torch and llama.cpp never share a process: on some GPU machines they crash each
other.
"""

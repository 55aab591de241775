"""Floor 2: one model. Its KV ledger, its scheduler, its worker thread, its llama.cpp context."""

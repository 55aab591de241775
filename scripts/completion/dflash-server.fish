# fish completion for dflash-server.
# Made by scripts/lib/completions.py from the table of options: change it there.

complete -c dflash-server -f -a '(__fish_complete_suffix .gguf)'
complete -c dflash-server -l load-balancing -d 'Load every model, and let a request go to the next one while the primary is busy.'
complete -c dflash-server -l load-balancing-primary-gpu -d 'The model with exactly this --target-device is tried first; nothing moves.' -x -a 'cuda:0 hip:0 vulkan:0 metal:0 sycl:0 cpu:0'
complete -c dflash-server -l config -d 'Read the launch from a TOML file; beside it, only launch and listener options.' -x -a '(__fish_complete_suffix .toml)'
complete -c dflash-server -l check -d 'Check the launch and its files, say what would load, and exit.'
complete -c dflash-server -l list-devices -d 'List the devices that models can be placed on, and exit.'
complete -c dflash-server -l log-format -d 'Log lines for people, or one JSON object a line.' -x -a 'console json'
complete -c dflash-server -l log-level -d 'The least severe log lines that are written.' -x -a 'debug info warning error'
complete -c dflash-server -l version -d 'Print the version and exit.'
complete -c dflash-server -l help -d 'Print this text and exit.'
complete -c dflash-server -l host -d 'The address to listen on: IPv4, IPv6, a host name, or unix:/path.' -x
complete -c dflash-server -l port -d 'The TCP port; 0 takes any free one and prints it.' -x
complete -c dflash-server -l routing-queue-limit -d 'Requests that may wait for a busy model; 0 answers 503 at once.' -x
complete -c dflash-server -l api-key -d 'A key that clients must send; may be repeated (also: DFLASH_API_KEY).' -x
complete -c dflash-server -l api-key-file -d 'A file of keys, one a line, blank lines skipped; may be repeated.' -r -F
complete -c dflash-server -l cors-origin -d 'An origin whose pages may call this server; may be repeated; * is every origin.' -x
complete -c dflash-server -l no-cors -d 'No origin may call from a browser page, as is the default.'
complete -c dflash-server -l drain-timeout -d 'Seconds that a shutdown waits for active requests before it ends them.' -x
complete -c dflash-server -l client-stall-timeout -d 'Seconds that a client may read nothing before its connection is cut.' -x
complete -c dflash-server -l max-body-bytes -d 'The largest request body in bytes; a larger one is answered 413.' -x
complete -c dflash-server -l max-connections -d 'Connections open at a time.' -x
complete -c dflash-server -l tls-cert -d 'The PEM certificate chain to serve HTTPS with; goes with --tls-key.' -r -F
complete -c dflash-server -l tls-key -d 'The PEM private key of --tls-cert.' -r -F
complete -c dflash-server -l model -d 'Start a model\'s block and name its GGUF file (of a split one, the first part).' -x -a '(__fish_complete_suffix .gguf)'
complete -c dflash-server -l model-name -d 'The model\'s name for clients; slashes and blanks are allowed.' -x
complete -c dflash-server -l alias -d 'One more name for the model; may be repeated.' -x
complete -c dflash-server -l target-device -d 'Where the model loads; auto is the first GPU with room, else cpu:0.' -x -a 'auto cuda:0 hip:0 vulkan:0 metal:0 sycl:0 cpu:0'
complete -c dflash-server -l gpu-layers -d 'How many layers go to the GPU; the rest stays on the CPU.' -x
complete -c dflash-server -l cpu-moe -d 'Keep the experts of a mixture-of-experts model on the CPU.'
complete -c dflash-server -l threads -d 'CPU threads of this model.' -x
complete -c dflash-server -l no-mmap -d 'Read the file into memory instead of mapping it.'
complete -c dflash-server -l mlock -d 'Keep the weights from being swapped out.'
complete -c dflash-server -l max-ctx -d 'Tokens that one sequence may hold, prompt and reply together.' -x
complete -c dflash-server -l max-concurrency -d 'Sequences that the model generates at a time.' -x
complete -c dflash-server -l kv-pool-tokens -d 'KV cells that the model\'s sequences share.' -x
complete -c dflash-server -l decode-headroom -d 'Cells that admission promises a sequence beyond its prompt.' -x
complete -c dflash-server -l cache-type-k -d 'The type of the K cache.' -x -a 'f32 f16 bf16 q8_0 q4_0 q4_1 iq4_nl q5_0 q5_1'
complete -c dflash-server -l cache-type-v -d 'The type of the V cache; a quantized one needs flash attention.' -x -a 'f32 f16 bf16 q8_0 q4_0 q4_1 iq4_nl q5_0 q5_1'
complete -c dflash-server -l flash-attn -d 'Whether attention runs in flash kernels.' -x -a 'auto on off'
complete -c dflash-server -l fa-window -d 'The window of attention in tokens; 0 is full attention.' -x
complete -c dflash-server -l chunk -d 'Prompt tokens that one step works off.' -x
complete -c dflash-server -l rope-freq-base -d 'The base frequency of the rotary positions.' -x
complete -c dflash-server -l rope-freq-scale -d 'The factor on the rotary frequencies.' -x
complete -c dflash-server -l chat-template-file -d 'A Jinja chat template to use instead.' -r -F
complete -c dflash-server -l model-card -d 'A TOML file of the model\'s own defaults.' -r -F
complete -c dflash-server -l default-max-tokens -d 'The reply limit of requests that name none.' -x
complete -c dflash-server -l hard-limit-reply-budget -d 'Tokens kept for the reply once thinking has used its share.' -x
complete -c dflash-server -l think-max-tokens -d 'The most tokens that one reply may think.' -x
complete -c dflash-server -l reasoning-effort-low -d 'Thinking tokens of a request with reasoning effort low.' -x
complete -c dflash-server -l reasoning-effort-medium -d 'Thinking tokens of a request with reasoning effort medium.' -x
complete -c dflash-server -l reasoning-effort-high -d 'Thinking tokens of a request with reasoning effort high.' -x
complete -c dflash-server -l reasoning-effort-x-high -d 'Thinking tokens of a request with reasoning effort x-high.' -x
complete -c dflash-server -l reasoning-effort-max -d 'Thinking tokens of a request with reasoning effort max.' -x
complete -c dflash-server -l thinking -d 'Whether the model thinks; auto is what its template does when told nothing.' -x -a 'auto on off'
complete -c dflash-server -l tool-parser -d 'The form in which the model writes its tool calls: hermes, qwen-xml, llama3-json, llama-pythonic, mistral, deepseek, gemma or gpt-oss.' -x -a 'hermes qwen-xml llama3-json llama-pythonic mistral deepseek gemma gpt-oss'
complete -c dflash-server -l temperature -d 'The temperature of requests that name none; 0 is greedy.' -x
complete -c dflash-server -l top-p -d 'The probability mass to sample from; 1 is all of it.' -x
complete -c dflash-server -l top-k -d 'How many tokens to sample from; 0 is all of them.' -x
complete -c dflash-server -l min-p -d 'The least probability, as a share of the likeliest token\'s.' -x
complete -c dflash-server -l repeat-penalty -d 'The penalty on tokens that came up lately.' -x
complete -c dflash-server -l seed -d 'The seed of requests that name none; -1 is a random one.' -x
complete -c dflash-server -l prefix-cache-slots -d 'Ended sequences kept for prompts that begin alike; 0 keeps none.' -x
complete -c dflash-server -l prefill-cache-slots -d 'Whole prompts kept as such, beside what became of them.' -x
complete -c dflash-server -l disk-prefix-cache -d 'A folder that keeps prompt beginnings over restarts, in the clear.' -x -a 'off (__fish_complete_directories)'
complete -c dflash-server -l draft -d 'The GGUF file of a draft for speculative decoding, or prompt-lookup.' -x -a 'prompt-lookup (__fish_complete_suffix .gguf)'
complete -c dflash-server -l draft-device -d 'Where the draft loads.' -x
complete -c dflash-server -l draft-max -d 'Tokens drafted at a time.' -x
complete -c dflash-server -l ddtree -d 'Draft a tree of continuations instead of one chain; all slots share the cells.'
complete -c dflash-server -l ddtree-budget -d 'Nodes of a drafted tree, at most.' -x
complete -c dflash-server -l lazy-draft -d 'Load the draft when a request comes, and free it after five idle minutes.'
complete -c dflash-server -l on-sigterm -d 'On shutdown, finish this model\'s active requests or end them properly at once.' -x -a 'drain finalize'
complete -c dflash-server -l ds4-fused-decode -d 'DeepSeek V4: decode in fused kernels, as is done wherever there are any.'
complete -c dflash-server -l ds4-expert-top-k -d 'DeepSeek V4: experts that a token uses.' -x
complete -c dflash-server -l ds4-prefill -d 'DeepSeek V4: how prompts are worked off; there is no other way.' -x -a 'exact'
complete -c dflash-server -l target-devices -d 'Splitting: the GPUs that share this model\'s layers.' -x
complete -c dflash-server -l target-layer-split -d 'Splitting: each device\'s share of the layers, in the order of --target-devices.' -x
complete -c dflash-server -l peer-access -d 'Splitting: let the GPUs read each other\'s memory.'
complete -c dflash_server -f -a '(__fish_complete_suffix .gguf)'
complete -c dflash_server -l load-balancing -d 'Load every model, and let a request go to the next one while the primary is busy.'
complete -c dflash_server -l load-balancing-primary-gpu -d 'The model with exactly this --target-device is tried first; nothing moves.' -x -a 'cuda:0 hip:0 vulkan:0 metal:0 sycl:0 cpu:0'
complete -c dflash_server -l config -d 'Read the launch from a TOML file; beside it, only launch and listener options.' -x -a '(__fish_complete_suffix .toml)'
complete -c dflash_server -l check -d 'Check the launch and its files, say what would load, and exit.'
complete -c dflash_server -l list-devices -d 'List the devices that models can be placed on, and exit.'
complete -c dflash_server -l log-format -d 'Log lines for people, or one JSON object a line.' -x -a 'console json'
complete -c dflash_server -l log-level -d 'The least severe log lines that are written.' -x -a 'debug info warning error'
complete -c dflash_server -l version -d 'Print the version and exit.'
complete -c dflash_server -l help -d 'Print this text and exit.'
complete -c dflash_server -l host -d 'The address to listen on: IPv4, IPv6, a host name, or unix:/path.' -x
complete -c dflash_server -l port -d 'The TCP port; 0 takes any free one and prints it.' -x
complete -c dflash_server -l routing-queue-limit -d 'Requests that may wait for a busy model; 0 answers 503 at once.' -x
complete -c dflash_server -l api-key -d 'A key that clients must send; may be repeated (also: DFLASH_API_KEY).' -x
complete -c dflash_server -l api-key-file -d 'A file of keys, one a line, blank lines skipped; may be repeated.' -r -F
complete -c dflash_server -l cors-origin -d 'An origin whose pages may call this server; may be repeated; * is every origin.' -x
complete -c dflash_server -l no-cors -d 'No origin may call from a browser page, as is the default.'
complete -c dflash_server -l drain-timeout -d 'Seconds that a shutdown waits for active requests before it ends them.' -x
complete -c dflash_server -l client-stall-timeout -d 'Seconds that a client may read nothing before its connection is cut.' -x
complete -c dflash_server -l max-body-bytes -d 'The largest request body in bytes; a larger one is answered 413.' -x
complete -c dflash_server -l max-connections -d 'Connections open at a time.' -x
complete -c dflash_server -l tls-cert -d 'The PEM certificate chain to serve HTTPS with; goes with --tls-key.' -r -F
complete -c dflash_server -l tls-key -d 'The PEM private key of --tls-cert.' -r -F
complete -c dflash_server -l model -d 'Start a model\'s block and name its GGUF file (of a split one, the first part).' -x -a '(__fish_complete_suffix .gguf)'
complete -c dflash_server -l model-name -d 'The model\'s name for clients; slashes and blanks are allowed.' -x
complete -c dflash_server -l alias -d 'One more name for the model; may be repeated.' -x
complete -c dflash_server -l target-device -d 'Where the model loads; auto is the first GPU with room, else cpu:0.' -x -a 'auto cuda:0 hip:0 vulkan:0 metal:0 sycl:0 cpu:0'
complete -c dflash_server -l gpu-layers -d 'How many layers go to the GPU; the rest stays on the CPU.' -x
complete -c dflash_server -l cpu-moe -d 'Keep the experts of a mixture-of-experts model on the CPU.'
complete -c dflash_server -l threads -d 'CPU threads of this model.' -x
complete -c dflash_server -l no-mmap -d 'Read the file into memory instead of mapping it.'
complete -c dflash_server -l mlock -d 'Keep the weights from being swapped out.'
complete -c dflash_server -l max-ctx -d 'Tokens that one sequence may hold, prompt and reply together.' -x
complete -c dflash_server -l max-concurrency -d 'Sequences that the model generates at a time.' -x
complete -c dflash_server -l kv-pool-tokens -d 'KV cells that the model\'s sequences share.' -x
complete -c dflash_server -l decode-headroom -d 'Cells that admission promises a sequence beyond its prompt.' -x
complete -c dflash_server -l cache-type-k -d 'The type of the K cache.' -x -a 'f32 f16 bf16 q8_0 q4_0 q4_1 iq4_nl q5_0 q5_1'
complete -c dflash_server -l cache-type-v -d 'The type of the V cache; a quantized one needs flash attention.' -x -a 'f32 f16 bf16 q8_0 q4_0 q4_1 iq4_nl q5_0 q5_1'
complete -c dflash_server -l flash-attn -d 'Whether attention runs in flash kernels.' -x -a 'auto on off'
complete -c dflash_server -l fa-window -d 'The window of attention in tokens; 0 is full attention.' -x
complete -c dflash_server -l chunk -d 'Prompt tokens that one step works off.' -x
complete -c dflash_server -l rope-freq-base -d 'The base frequency of the rotary positions.' -x
complete -c dflash_server -l rope-freq-scale -d 'The factor on the rotary frequencies.' -x
complete -c dflash_server -l chat-template-file -d 'A Jinja chat template to use instead.' -r -F
complete -c dflash_server -l model-card -d 'A TOML file of the model\'s own defaults.' -r -F
complete -c dflash_server -l default-max-tokens -d 'The reply limit of requests that name none.' -x
complete -c dflash_server -l hard-limit-reply-budget -d 'Tokens kept for the reply once thinking has used its share.' -x
complete -c dflash_server -l think-max-tokens -d 'The most tokens that one reply may think.' -x
complete -c dflash_server -l reasoning-effort-low -d 'Thinking tokens of a request with reasoning effort low.' -x
complete -c dflash_server -l reasoning-effort-medium -d 'Thinking tokens of a request with reasoning effort medium.' -x
complete -c dflash_server -l reasoning-effort-high -d 'Thinking tokens of a request with reasoning effort high.' -x
complete -c dflash_server -l reasoning-effort-x-high -d 'Thinking tokens of a request with reasoning effort x-high.' -x
complete -c dflash_server -l reasoning-effort-max -d 'Thinking tokens of a request with reasoning effort max.' -x
complete -c dflash_server -l thinking -d 'Whether the model thinks; auto is what its template does when told nothing.' -x -a 'auto on off'
complete -c dflash_server -l tool-parser -d 'The form in which the model writes its tool calls: hermes, qwen-xml, llama3-json, llama-pythonic, mistral, deepseek, gemma or gpt-oss.' -x -a 'hermes qwen-xml llama3-json llama-pythonic mistral deepseek gemma gpt-oss'
complete -c dflash_server -l temperature -d 'The temperature of requests that name none; 0 is greedy.' -x
complete -c dflash_server -l top-p -d 'The probability mass to sample from; 1 is all of it.' -x
complete -c dflash_server -l top-k -d 'How many tokens to sample from; 0 is all of them.' -x
complete -c dflash_server -l min-p -d 'The least probability, as a share of the likeliest token\'s.' -x
complete -c dflash_server -l repeat-penalty -d 'The penalty on tokens that came up lately.' -x
complete -c dflash_server -l seed -d 'The seed of requests that name none; -1 is a random one.' -x
complete -c dflash_server -l prefix-cache-slots -d 'Ended sequences kept for prompts that begin alike; 0 keeps none.' -x
complete -c dflash_server -l prefill-cache-slots -d 'Whole prompts kept as such, beside what became of them.' -x
complete -c dflash_server -l disk-prefix-cache -d 'A folder that keeps prompt beginnings over restarts, in the clear.' -x -a 'off (__fish_complete_directories)'
complete -c dflash_server -l draft -d 'The GGUF file of a draft for speculative decoding, or prompt-lookup.' -x -a 'prompt-lookup (__fish_complete_suffix .gguf)'
complete -c dflash_server -l draft-device -d 'Where the draft loads.' -x
complete -c dflash_server -l draft-max -d 'Tokens drafted at a time.' -x
complete -c dflash_server -l ddtree -d 'Draft a tree of continuations instead of one chain; all slots share the cells.'
complete -c dflash_server -l ddtree-budget -d 'Nodes of a drafted tree, at most.' -x
complete -c dflash_server -l lazy-draft -d 'Load the draft when a request comes, and free it after five idle minutes.'
complete -c dflash_server -l on-sigterm -d 'On shutdown, finish this model\'s active requests or end them properly at once.' -x -a 'drain finalize'
complete -c dflash_server -l ds4-fused-decode -d 'DeepSeek V4: decode in fused kernels, as is done wherever there are any.'
complete -c dflash_server -l ds4-expert-top-k -d 'DeepSeek V4: experts that a token uses.' -x
complete -c dflash_server -l ds4-prefill -d 'DeepSeek V4: how prompts are worked off; there is no other way.' -x -a 'exact'
complete -c dflash_server -l target-devices -d 'Splitting: the GPUs that share this model\'s layers.' -x
complete -c dflash_server -l target-layer-split -d 'Splitting: each device\'s share of the layers, in the order of --target-devices.' -x
complete -c dflash_server -l peer-access -d 'Splitting: let the GPUs read each other\'s memory.'

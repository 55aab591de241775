# bash completion for dflash-server.
# Made by scripts/lib/completions.py from the table of options: change it there.

_dflash_server_words() {
    mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -W "$2" -- "$1")
}

_dflash_server_folders() {
    compopt -o filenames 2>/dev/null
    mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -d -- "$1")
}

# Folders, and files with an ending.
_dflash_server_files() {
    local name
    _dflash_server_folders "$1"
    while IFS= read -r name; do
        [[ -d $name ]] || COMPREPLY+=("$name")
    done < <(compgen -f -X "!*$2" -- "$1")
}

_dflash_server() {
    # Not COMP_WORDS: bash cuts those at = and at the colon of a device. (A blank ends a path.)
    local line=${COMP_LINE:0:COMP_POINT} word option start=""
    word=${line##*[[:space:]]}
    line=${line%"$word"}
    line=${line%"${line##*[![:space:]]}"}
    option=${line##*[[:space:]]}
    if [[ $word == --*=* ]]; then
        option=${word%%=*}
        word=${word#*=}
    fi
    # What is in front of a colon stands there already, and is not put there again.
    [[ $word == *:* && $COMP_WORDBREAKS == *:* ]] && start=${word%"${word##*:}"}
    COMPREPLY=()
    case $option in
        --load-balancing-primary-gpu)
            _dflash_server_words "$word" "cuda:0 hip:0 vulkan:0 metal:0 sycl:0 cpu:0"
            ;;
        --config)
            _dflash_server_files "$word" .toml
            ;;
        --log-format)
            _dflash_server_words "$word" "console json"
            ;;
        --log-level)
            _dflash_server_words "$word" "debug info warning error"
            ;;
        --host | --port | --routing-queue-limit | --api-key | --cors-origin | --drain-timeout | --client-stall-timeout | --max-body-bytes | --max-connections | --model-name | --alias | --gpu-layers | --threads | --max-ctx | --max-concurrency | --kv-pool-tokens | --decode-headroom | --fa-window | --chunk | --rope-freq-base | --rope-freq-scale | --default-max-tokens | --hard-limit-reply-budget | --think-max-tokens | --reasoning-effort-low | --reasoning-effort-medium | --reasoning-effort-high | --reasoning-effort-x-high | --reasoning-effort-max | --temperature | --top-p | --top-k | --min-p | --repeat-penalty | --seed | --prefix-cache-slots | --prefill-cache-slots | --draft-device | --draft-max | --ddtree-budget | --ds4-expert-top-k | --target-devices | --target-layer-split)
            :
            ;;
        --api-key-file | --tls-cert | --tls-key | --chat-template-file | --model-card)
            _dflash_server_files "$word" ""
            ;;
        --model)
            _dflash_server_files "$word" .gguf
            ;;
        --target-device)
            _dflash_server_words "$word" "auto cuda:0 hip:0 vulkan:0 metal:0 sycl:0 cpu:0"
            ;;
        --cache-type-k | --cache-type-v)
            _dflash_server_words "$word" "f32 f16 bf16 q8_0 q4_0 q4_1 iq4_nl q5_0 q5_1"
            ;;
        --flash-attn | --thinking)
            _dflash_server_words "$word" "auto on off"
            ;;
        --tool-parser)
            _dflash_server_words "$word" "hermes qwen-xml llama3-json llama-pythonic mistral deepseek gemma gpt-oss"
            ;;
        --disk-prefix-cache)
            _dflash_server_words "$word" "off"; _dflash_server_folders "$word"
            ;;
        --draft)
            _dflash_server_words "$word" "prompt-lookup"; _dflash_server_files "$word" .gguf
            ;;
        --on-sigterm)
            _dflash_server_words "$word" "drain finalize"
            ;;
        --ds4-prefill)
            _dflash_server_words "$word" "exact"
            ;;
        *)
            if [[ $word == -* ]]; then
                _dflash_server_words "$word" "--load-balancing --load-balancing-primary-gpu --config --check --list-devices --log-format --log-level --version --help --host --port --routing-queue-limit --api-key --api-key-file --cors-origin --no-cors --drain-timeout --client-stall-timeout --max-body-bytes --max-connections --tls-cert --tls-key --model --model-name --alias --target-device --gpu-layers --cpu-moe --threads --no-mmap --mlock --max-ctx --max-concurrency --kv-pool-tokens --decode-headroom --cache-type-k --cache-type-v --flash-attn --fa-window --chunk --rope-freq-base --rope-freq-scale --chat-template-file --model-card --default-max-tokens --hard-limit-reply-budget --think-max-tokens --reasoning-effort-low --reasoning-effort-medium --reasoning-effort-high --reasoning-effort-x-high --reasoning-effort-max --thinking --tool-parser --temperature --top-p --top-k --min-p --repeat-penalty --seed --prefix-cache-slots --prefill-cache-slots --disk-prefix-cache --draft --draft-device --draft-max --ddtree --ddtree-budget --lazy-draft --on-sigterm --ds4-fused-decode --ds4-expert-top-k --ds4-prefill --target-devices --target-layer-split --peer-access"
            else
                _dflash_server_files "$word" .gguf
            fi
            ;;
    esac
    COMPREPLY=("${COMPREPLY[@]#"$start"}")
}

complete -F _dflash_server dflash-server dflash_server

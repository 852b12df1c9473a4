#!/bin/bash
# vLLM serves {{model}}, whose files lie in {{model_folder}}: {{replicas}} replicas, each on {{tensor_parallel}} GPUs, from a
# container that shares this machine's loopback, so that nobody else's machine reaches it. Ranks exchange data through shared
# memory, hence --ipc host.
set -eu
exec docker run --rm --init --name {{name}} --gpus '"device={{devices}}"' --ipc host --network host \
  --volume {{model_folder}}:/model:ro --env VLLM_HOST_IP=127.0.0.1 --env VLLM_NO_USAGE_STATS=1 --env HF_HUB_OFFLINE=1 \
  --health-cmd 'curl --fail --silent http://127.0.0.1:{{port}}/health' --health-start-period {{seconds}}s \
  --stop-timeout 60 --entrypoint python3 {{image}} \
  -m vllm.entrypoints.openai.api_server --model /model --served-model-name {{model}} --host 127.0.0.1 --port {{port}} \
  --tensor-parallel-size {{tensor_parallel}} --data-parallel-size {{replicas}} --dtype {{dtype}} \
  --max-num-batched-tokens {{max_num_batched_tokens}}

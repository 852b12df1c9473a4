#!/bin/bash
# The course's own server answers for {{model}}, whose files lie in {{model_folder}}, with {{ranks}} replicas, a GPU each, from a
# container whose image holds the course in its working directory. It shares this machine's loopback, so that nobody else's
# machine reaches it.
set -eu
exec docker run --rm --init --name {{name}} --gpus '"device={{devices}}"' --ipc host --network host \
  --volume {{model_folder}}:/model:ro --env HF_HUB_OFFLINE=1 \
  --health-cmd 'curl --fail --silent http://127.0.0.1:{{port}}/health' --health-start-period {{seconds}}s \
  --stop-timeout 60 --entrypoint python3 {{image}} \
  -m torch.distributed.run --nproc_per_node={{ranks}} helpers/inference_server.py --model_name /model \
  --served_model_name {{model}} --batch_size {{batch_size}} --max_length {{max_length}} --port {{port}}

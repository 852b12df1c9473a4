#!/bin/bash
# Serving one model over {{nodes}} hosts of {{ranks_per_node}} GPUs: run this on every host, with HEAD (the first host's address),
# HERE (this host's address) and IS_HEAD (1 on the first host, else 0) set.
set -eu
export VLLM_HOST_IP="$HERE"  # the address by which Ray knows this host; with another one vLLM waits for hosts that never come

if [ "$IS_HEAD" = 0 ]; then
  exec ray start --address "$HEAD:{{port}}" --node-ip-address "$HERE" --num-gpus {{ranks_per_node}} --block
fi
ray start --head --port {{port}} --node-ip-address "$HERE" --num-gpus {{ranks_per_node}}
until python3 -c 'import ray, sys; ray.init(address="auto"); sys.exit(sum(n["Alive"] for n in ray.nodes()) < {{nodes}})'; do
  sleep 2
done
exec vllm serve {{model}} --tensor-parallel-size {{ranks_per_node}} --pipeline-parallel-size {{nodes}} \
  --distributed-executor-backend ray --host "$HERE" --port {{serve_port}}

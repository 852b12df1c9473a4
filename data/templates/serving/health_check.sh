#!/bin/bash
# Waits until the server on port {{port}} is up, {{seconds}} s at most, then asks {{model}} for one token. Exit code 0: it answers.
set -eu
URL=http://127.0.0.1:{{port}}
UNTIL=$((SECONDS + {{seconds}}))
until curl --fail --silent --max-time 5 --output /dev/null "$URL/health"; do
  if [ "$SECONDS" -ge "$UNTIL" ]; then
    echo "no healthy answer from $URL/health within {{seconds}} s" >&2
    exit 1
  fi
  sleep 1
done
ANSWER=$(curl --fail --silent --show-error --max-time 60 --header 'Content-Type: application/json' \
  --data '{"model": "{{model}}", "prompt": [0], "max_tokens": 1, "temperature": 0}' "$URL/v1/completions")
case "$ANSWER" in
  *'"choices"'*) echo "{{model}} answers on port {{port}}" ;;
  *) echo "a reply without choices: $ANSWER" >&2; exit 1 ;;
esac

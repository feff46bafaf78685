#!/usr/bin/env bash
# Three learners of one run, in three regions: ./learners.sh RUN SYNCER:PORT KEYS DIST
#
# KEYS is the folder of `skerry keys KEYS --learner RUN/us-1 --learner RUN/eu-1 --learner RUN/asia-1`, and DIST has the
# wheel of `python -m build`.
set -euo pipefail
[[ $# == 4 ]] || { sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 2; }
run=$1 target=$2 keys=$(realpath "$3") dist=$(realpath "$4")
here=$(dirname "$(realpath "$0")")

shard=0
for place in us-1:aws/us-east-1 eu-1:gcp/europe-west4 asia-1:aws/ap-northeast-1; do
    shard=$((shard + 1))
    learner=${place%%:*}
    # What learner.yaml mounts lies beside it: each learner gets its own pair, and no other's.
    folder=$(mktemp -d)
    mkdir "$folder/keys"
    cp "$here/learner.yaml" "$folder"
    cp -r "$dist" "$folder/dist"
    cp "$keys/ca.pem" "$folder/keys"
    cp "$keys/$run.$learner.pem" "$folder/keys/learner.pem"
    cp "$keys/$run.$learner.key" "$folder/keys/learner.key"
    (
        cd "$folder"
        ${SKY:-sky} jobs launch --yes --detach-run --name "skerry-$learner" --infra "${place#*:}" \
            --env SKERRY_TARGET="$target" --env SKERRY_RUN="$run" --env SKERRY_LEARNER_ID="$learner" \
            --env SKERRY_REGION="${learner%-*}" --env SKERRY_SHARD="$shard/3" learner.yaml
    )
    rm -r "$folder"
done

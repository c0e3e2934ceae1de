#!/usr/bin/env bash
# Every fuzz target for so many seconds each (60 unless said otherwise), from the kept corpus on. Fails at the first that finds something.
#
#   fuzz/run.sh [SECONDS [TARGET...]]
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-60}
shift || true
targets=("${@:-}")
[ -n "${targets[0]}" ] || targets=(rust-link rust-untar link layer_tar download)
build=build/fuzz
triple=x86_64-unknown-linux-gnu

# The instrumentation of libFuzzer, by the stable compiler: cargo-fuzz would ask for a nightly one.
rust() {
    local flags="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-inline-8bit-counters"
    flags+=" -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares"
    RUSTFLAGS=$flags cargo build -q --release --locked --manifest-path fuzz/rust/Cargo.toml --target $triple --target-dir target/fuzz
    local corpus=$1
    [ "$corpus" = untar ] && corpus=tar
    mkdir -p "$build/rust-$1"
    target/fuzz/$triple/release/"$1" "$build/rust-$1" "fuzz/corpus/$corpus" -max_total_time="$seconds" -max_len=8192 -timeout=20 \
        -rss_limit_mb=1024 -print_final_stats=1 -artifact_prefix="$build/crash-rust-$1-"
}

mkdir -p $build
for target in "${targets[@]}"; do
    log=$build/$target.log
    case $target in
        rust-*) command=(rust "${target#rust-}") ;;
        *) command=(.venv/bin/python fuzz/python/run.py "$target" "$seconds") ;;
    esac
    if ! "${command[@]}" >"$log" 2>&1; then
        tail -40 "$log" >&2
        echo "fuzz: $target found something: the input is $build/crash-$target-*, the whole story $log" >&2
        exit 1
    fi
    echo "$target: $(grep -oP 'number_of_executed_units: \K\d+' "$log") inputs, $(grep -oP 'average_exec_per_sec: +\K\d+' "$log")/s"
done

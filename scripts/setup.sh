#!/usr/bin/env bash
# Everything `make` needs before it can run anything: system packages, .venv, the static binary, the base layer.
# Each step is skipped when it is done already. What cannot be mended here is said in one line with the remedy.
#
#   scripts/setup.sh packages|venv|runtime|base ...
set -euo pipefail
cd "$(dirname "$0")/.."

die() { echo "setup: $1" >&2; exit 1; }
say() { echo "setup: $1" >&2; }

machine() {
    [ "$(uname -s)-$(uname -m)" = Linux-x86_64 ] || die "DSec runs on x86-64 Linux, this is $(uname -s) $(uname -m): use another machine"
    [ "$(id -u)" = 0 ] || die "not root: sandboxes need namespaces, mounts and cgroups; run it with sudo"
    local major minor
    IFS=. read -r major minor _ < <(uname -r)
    minor=${minor%%[^0-9]*}
    [ "$major" -gt 6 ] || { [ "$major" = 6 ] && [ "$minor" -ge 12 ]; } ||
        die "kernel $(uname -r) is too old: layers are mounted from files, which needs Linux 6.12; upgrade the kernel (Debian: bookworm-backports)"
}

packages() {
    machine
    local missing=() package
    for package in erofs-utils btrfs-progs mmdebstrap gcc g++ libc6-dev make git ca-certificates; do
        dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
    [ ${#missing[@]} = 0 ] && return
    command -v apt-get >/dev/null || die "apt-get is missing: install ${missing[*]} by hand"
    say "installing ${missing[*]}"
    apt-get update -qq >/dev/null || die "apt-get update failed: check the machine's package sources"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null ||
        die "apt-get could not install ${missing[*]}: check the machine's package sources"
}

python() {
    local candidate
    # The distribution's own comes first: it is built with profile-guided optimisation, a tenth faster here than a plain build.
    for candidate in "${PYTHON:-}" /usr/bin/python3.11 python3.11 python3 python3.12 python3.13; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "Python 3.11 with venv is missing: apt-get install python3 python3-venv"
}

venv() {
    local stamp wanted interpreter
    wanted=$(cat requirements.lock pyproject.toml | sha256sum)
    stamp=.venv/.installed
    [ -f $stamp ] && [ "$(cat $stamp)" = "$wanted" ] && return
    say "installing Python packages into .venv"
    if [ ! -x .venv/bin/python ]; then
        interpreter=$(python) || exit 1
        "$interpreter" -m venv .venv || die "cannot make .venv: apt-get install python3-venv"
    fi
    .venv/bin/python -m pip install -q --disable-pip-version-check --require-hashes -r requirements.lock ||
        die "pip could not install requirements.lock: check the machine's package index"
    .venv/bin/python -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e . ||
        die "pip could not install this checkout"
    echo "$wanted" >$stamp
}

runtime() {
    command -v cargo >/dev/null || die "cargo is missing: install Rust (rustup, or apt-get install cargo rustc if 1.80 or newer)"
    cargo build -q --release --locked || die "the static binary could not be built: see the compiler's words above"
}

base() {
    .venv/bin/dsec layer build debian
}

for step in "$@"; do
    case $step in
        machine|packages|venv|runtime|base) $step ;;
        *) die "no step $step" ;;
    esac
done

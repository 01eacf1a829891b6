# Sourced by scripts/demo and scripts/test: a virtual environment with exactly the locked packages.
# usage: ensure_venv run|dev   (sets VENV)

say() { printf '%s\n' "· $*" >&2; }

find_python() {
  local candidate
  for candidate in "${FORGE_PYTHON:-}" python3.13 python3.12 python3.11 python3; do
    if [ -n "$candidate" ] && command -v "$candidate" >/dev/null 2>&1 &&
      "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      printf '%s' "$candidate"
      return
    fi
  done
  echo "forge-bridge needs Python 3.11 or later; on Debian: apt-get install python3 python3-venv" >&2
  return 1
}

make_venv() {
  local python=$1 directory=$2 sudo=""
  "$python" -m venv "$directory" >/dev/null 2>&1 && return
  rm -rf "$directory"
  [ "$(id -u)" = 0 ] || sudo=sudo
  if command -v apt-get >/dev/null 2>&1 && { [ -z "$sudo" ] || sudo -n true 2>/dev/null; }; then
    say "installing Debian's python3-venv"
    $sudo apt-get -qq update >&2
    DEBIAN_FRONTEND=noninteractive $sudo apt-get -qq install -y --no-install-recommends python3-venv >&2
    "$python" -m venv "$directory" && return
  fi
  echo "cannot make a virtual environment: apt-get install python3-venv" >&2
  return 1
}

ensure_venv() {
  local lock=requirements/$1.lock python wanted
  python=$(find_python) || return 1
  VENV=.cache/venv-$1
  wanted=$(cat "$lock" pyproject.toml scripts/lib/venv.sh | sha256sum | cut -d' ' -f1)-$("$python" -V)
  [ "$(cat "$VENV/.installed" 2>/dev/null)" = "$wanted" ] && return
  say "installing the locked Python packages into $VENV"
  mkdir -p .cache
  rm -rf "$VENV"
  make_venv "$python" "$VENV" || return 1
  "$VENV/bin/python" -m pip --disable-pip-version-check install -qq --require-hashes --no-deps -r "$lock" >&2 || return 1
  "$VENV/bin/python" -m pip --disable-pip-version-check install -qq --no-build-isolation --no-deps -e . >&2 || return 1
  printf '%s' "$wanted" >"$VENV/.installed"
}

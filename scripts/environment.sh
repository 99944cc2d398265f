# Sourced by demo.sh and test.sh: find a Python, make a virtual environment, install with the pinned versions.

find_python() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "Python 3.11 or newer is needed, and none was found on PATH" >&2
  return 1
}

# make_environment DIRECTORY WHAT: install WHAT (such as ".[demo]", editable); nothing is done when nothing changed.
make_environment() {
  local directory=$1 what=$2 key
  key="$what $(cat pyproject.toml constraints.txt | sha256sum)"
  if [ -x "$directory/bin/python" ] && grep -qsxF "$key" "$directory/installed"; then
    return
  fi
  echo "making $directory (a minute or two)" >&2
  [ -x "$directory/bin/python" ] || "$(find_python)" -m venv "$directory"
  "$directory/bin/pip" install --quiet --disable-pip-version-check -c constraints.txt -e "$what"
  echo "$key" >>"$directory/installed"
}

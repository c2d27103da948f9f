#!/usr/bin/env bash
# Fetch what the web page takes from npm: the versions and files that vendored.json names, as `npm pack` gives them.
# To take a newer version: change it there, run this, put the new hashes there, and look at the page.
set -euo pipefail
cd "$(dirname "$0")/../mtask/web/page/static/vendor"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
list='import json; [print(name, one["package"], one["version"], file) for name, one in json.load(open("vendored.json")).items() for file in one["files"]]'
python3 -c "$list" | while read -r name package version file; do
    if [[ ! -d $folder/$name ]]; then
        mkdir -p "$folder/$name"
        npm pack --silent --pack-destination "$folder/$name" "$package@$version" >/dev/null 2>&1 </dev/null
        tar -xzf "$folder/$name"/*.tgz -C "$folder/$name"
    fi
    mkdir -p "$name"
    cp "$folder/$name/package/$file" "$name/$(basename "$file")"
done
sha256sum -- */*

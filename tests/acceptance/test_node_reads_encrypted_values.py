"""The Node code of docs/encryption.md, executed: it reads what mtask has encrypted, and writes what mtask can read.

npm has the native part of Node's package for some platforms only, and fetches it from another host. So this test builds
it from its source, with Debian's libmongocrypt.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from mtask import Client
from mtask.local import temporary
from tests.keys import MASTER_KEY, encryption_of, make_keys

PAGE = Path(__file__).parents[2] / "docs" / "encryption.md"
PACKAGES = ("mongodb@6.20.0", "mongodb-client-encryption@6.0.0")
DATABASE = "node"
#: Link the library of the system; take the header files of the Node that is installed; and take what newer headers made
#: an error for a warning.
BUILD = {"BUILD_TYPE": "dynamic", "npm_config_build_from_source": "true", "CXXFLAGS": "-fpermissive"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the driver and its package for encryption."""
    node = shutil.which("node")
    assert node is not None, "node is not installed: run tools/setup.sh dev"
    made = tmp_path_factory.mktemp("node")
    headers = Path(node).resolve().parents[1]
    environment = {**os.environ, **BUILD, "npm_config_nodedir": str(headers)}
    command = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error", *PACKAGES]
    ran = subprocess.run(command, cwd=made, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert ran.returncode == 0, f"apt-get install g++ make python3 libmongocrypt-dev\n{ran.stderr}"
    return made


def program() -> str:
    """Return the code of the page as one program, which prints what it has read and stores what it has encrypted."""
    reads, writes = re.findall(r"```js\n(.*?)```", PAGE.read_text(), re.DOTALL)
    own = {'"mtask_keys.keys"': f'"{DATABASE}.vault"', '"shop"': f'"{DATABASE}"'}
    for theirs, ours in own.items():
        assert theirs in reads
        reads = reads.replace(theirs, ours)
    imported, _, body = reads.partition("\n")
    return f"""{imported}
        const uri = process.argv[2], masterKey = Buffer.from(process.argv[3], "hex");
        (async () => {{
            {body}
            console.log(JSON.stringify(v));
            {writes}
            const changed = {{ $set: {{ params, sealed: "queue:mail" }} }};
            await client.db("{DATABASE}").collection("tasks").updateOne({{ _id: "send_email:welcome/43" }}, changed);
            await client.close();
        }})();
    """


@pytest.mark.long
def test_node_reads_and_writes_encrypted_params_as_the_page_shows(folder: Path) -> None:
    (folder / "program.cjs").write_text(program())
    with temporary() as server:
        make_keys(server.uri, DATABASE, "queue:mail")
        with Client(server.uri, database=DATABASE, encryption=encryption_of(DATABASE)) as client:
            client.publish("send_email", {"to": "ada@example.com"}, key="welcome/42", queue="mail")
            with Client(server.uri, database=DATABASE) as plain:
                assert "ada" not in str(plain.tasks.find_one())
            with Client(server.uri, database=DATABASE) as plain:
                plain.publish("send_email", {}, key="welcome/43", queue="mail", delay=3600)
            command = ["node", "program.cjs", server.uri, MASTER_KEY.hex()]
            ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
            assert (ran.returncode, ran.stdout) == (0, '{"to":"ada@example.com"}\n'), ran.stderr
            assert client.get("send_email", "welcome/43").params == {"to": "a@b.c"}

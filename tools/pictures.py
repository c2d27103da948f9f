"""Make the pictures of docs/web.md: `make pictures` runs the demo, and looks at its page with Chromium meanwhile."""

from __future__ import annotations

import re
import sysconfig
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlencode, urlsplit

from mtask import Client
from mtask.demo.app import find_files
from mtask.demo.play import Plan, Play
from mtask.demo.watch import Scene
from mtask.local import temporary
from tests.integration.web.page.browser import Browser, browsing

FOLDER = Path(__file__).parents[1] / "docs" / "pictures"
FILES = Path(sysconfig.get_path("stdlib"))
MOST = 4_000
#: The part of the tasks that have ended when the picture of the running work is taken.
PART = 0.15


class Painter:
    """Takes each picture when the demo has come to its moment."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.taken: set[str] = set()
        self.is_open = False
        self.uri = ""
        self.browser: Browser

    def look(self) -> None:
        """Take the pictures whose moment has come. The demo calls this again and again."""
        finished, total = self.scene.look.finished, self.scene.total
        if finished > PART * total and "overview" not in self.taken:
            self.take("overview", "/", 1180)
        if finished == total and "task" not in self.taken and self.scene.rescues:
            self.take("tasks", "/tasks", 1180, is_dark=True, height=640)
            # Below this height, the params hold a path of this machine.
            self.take("task", self.rescued(), 1180, height=490)
            self.take("phone", "/", 390, height=844)

    def rescued(self) -> str:
        """Return the address of a task that was preempted from the killed worker."""
        victim = self.scene.kill
        assert victim is not None
        with Client(self.uri, database="mtask_demo", check=False) as client:
            found = client.find(worker_id=victim.worker_id, limit=500)
        task = next(one for one in found if any(run.status == "TIMEOUT" for run in one.runs))
        return "/task?" + urlencode({"name": task.name, "key": task.key})

    def take(self, name: str, path: str, width: int, *, is_dark: bool = False, height: int = 760) -> None:
        """Take one picture."""
        self.browser.size(width, height)
        self.browser.dark(is_dark)
        self.browser.open(path)
        self.browser.until(lambda: self.browser.text("#connection") in ("live", ""), "the page is live")
        if path == "/":
            self.browser.until(lambda: bool(self.browser.all(".u-wrap")), "the charts are drawn")
        self.browser.picture(FOLDER / f"{name}.png", most=height)
        self.taken.add(name)


def main() -> None:
    """Run the demo, and take the pictures."""
    files = find_files(FILES, MOST)
    scene = Scene("pictures", len(files), has_kill=True)
    painter = Painter(scene)

    def notify() -> None:
        links = re.findall(r"http://\S+", " ".join(scene.done))
        if links and not painter.is_open:
            address = urlsplit(links[0])
            painter.browser = stack.enter_context(browsing(f"{address.scheme}://{address.netloc}"))
            painter.browser.driver.get(links[0])
            painter.is_open = True
        if painter.is_open:
            painter.look()

    with temporary() as server, ExitStack() as stack:
        painter.uri = server.uri
        Play(Plan(FILES, files, concurrency=4, web=True, uri=server.uri), scene, notify).run()
    size = sum(file.stat().st_size for file in FOLDER.glob("*.png"))
    print(f"{len(painter.taken)} pictures, {size / 1000:.0f} kB in all")
    assert painter.taken == {"overview", "tasks", "task", "phone"}
    assert size < 400_000, "they are committed: keep them small"


if __name__ == "__main__":
    main()

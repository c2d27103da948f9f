"""Sessions, CSRF, roles and tenants of the page, over real HTTP."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from urllib.parse import quote, urlencode

import httpx
import pytest

from mtask.web.page.page import all_addresses
from mtask.web.settings import WebSettings
from tests.integration.web.serving import Serve, Serving
from tests.mongo import until

_CSRF = re.compile(r'"X-CSRF-Token": "([^"]+)"')
_VIEWS = (
    "/",
    "/tasks",
    "/flows",
    "/queues",
    "/queue?queue=mail",
    "/workers",
    "/schedules",
    "/handlers",
    "/log",
    "/charts",
    "/live",
)
#: A change of each address, with a form that would do something.
_CHANGES = {
    "/task/cancel?name=echo&key=a": {},
    "/task/retry?name=echo&key=a": {"params": "{}"},
    "/task/rerun?name=echo&key=a": {},
    "/task/priority?name=echo&key=a": {"priority": "5"},
    "/task/remove?name=echo&key=a": {},
    "/flow/cancel?key=f": {},
    "/flow/retry?key=f": {},
    "/flow/retry-step?key=f&name=echo&step=f/a": {},
    "/queue/pause?queue=mail": {},
    "/queue/resume?queue=mail": {},
    "/queue/limit?queue=mail": {"concurrency": "1"},
    "/queue/breaker?queue=mail": {"failures": "3", "wait": "2s"},
    "/queue/keep?queue=mail": {"success": "1"},
    "/queue/fair?queue=mail": {},
    "/queue/unfair?queue=mail": {},
    "/name/pause": {"name": "echo"},
    "/name/resume": {"name": "echo"},
    "/worker/stop?worker_id=w": {},
    "/worker/resize?worker_id=w": {"concurrency": "1"},
    "/bulk/plan?name=echo&status=FAIL": {"action": "remove"},
    "/bulk/run": {"action": "remove", "plan": "none"},
    "/schedule/add": {"id": "s", "name": "echo", "when": "* * * * *"},
    "/schedule/pause?id=s": {},
    "/schedule/resume?id=s": {},
    "/schedule/remove?id=s": {},
    "/handler/publish?name=echo": {"hash": "x"},
}
_OF_PUBLISHERS = ("/handler/publish", "/task/cancel", "/task/retry", "/task/rerun", "/task/priority", "/flow/")


class Visitor:
    """A browser without scripts."""

    def __init__(self, server: Serving, http: httpx.AsyncClient) -> None:
        self.server, self.http = server, http

    async def get(self, path: str, **headers: str) -> httpx.Response:
        return await self.http.get(path, headers=headers)

    async def csrf(self) -> str:
        """Return the session's CSRF token, as each page's forms hold it."""
        found = _CSRF.search((await self.get("/tasks")).text)
        assert found is not None
        return found[1]

    async def post(self, path: str, form: dict[str, str], **headers: str) -> httpx.Response:
        given = {"Origin": self.server.url, "Content-Type": "application/x-www-form-urlencoded", **headers}
        return await self.http.post(path, content=urlencode(form), headers=given)

    async def send(self, path: str, **form: str) -> httpx.Response:
        """Send a form as its page does."""
        return await self.post(path, {"csrf": await self.csrf(), **form})


@asynccontextmanager
async def visiting(server: Serving, token: str | None = None) -> AsyncIterator[Visitor]:
    """Give the block a browser, with the session of a token."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60, trust_env=False) as http:
        if token is not None:
            answer = await Visitor(server, http).post("/login", {"token": token})
            assert (answer.status_code, answer.headers["location"]) == (303, "/")
        yield Visitor(server, http)


async def test_without_a_session_there_is_only_the_login(server: Serving) -> None:
    async with visiting(server) as visitor:
        for path in (*_VIEWS, *(f"/task?name=echo&key={quote('a/b', safe='')}",)):
            answer = await visitor.get(path)
            if path == "/live":
                assert answer.status_code == 401
                continue
            assert answer.status_code == 303, path
            where = answer.headers["location"]
            assert where == "/login" if path == "/" else f"/login?next={quote(path, safe='')}"
            fragment = await visitor.get(path, **{"HX-Request": "true"})
            assert fragment.status_code == 401, path
        for path, form in _CHANGES.items():
            assert (await visitor.post(path, form)).status_code == 401, path
        bearer = {"Authorization": "Bearer operate"}
        assert (await visitor.get("/tasks", **bearer)).status_code == 303, "the page takes no token"


async def test_token_becomes_a_cookie_and_leaves_the_address(server: Serving) -> None:
    async with visiting(server) as visitor:
        answer = await visitor.post("/login", {"token": "read", "next": "/tasks?status=FAIL"})
        assert (answer.status_code, answer.headers["location"]) == (303, "/tasks?status=FAIL")
        name, _, rest = answer.headers["set-cookie"].partition("=")
        assert name == f"mtask-{server.port}"
        value, *attributes = rest.split("; ")
        assert "read" not in value
        assert set(attributes) == {"Path=/", "Max-Age=43200", "HttpOnly", "SameSite=Strict"}
        assert answer.headers["cache-control"] == "no-store"
        origin = {"Origin": server.url.replace("http:", "https:"), "X-Forwarded-Proto": "https"}
        over_tls = await visitor.post("/login", {"token": "read"}, **origin)
        assert over_tls.headers["set-cookie"].startswith(f"__Host-mtask-{server.port}=")
        assert "Secure" in over_tls.headers["set-cookie"].split("; ")
        for wrong in ("wrong", "x" * 5_000, "%00", "reader"):
            refused = await visitor.get(f"/login?token={wrong}")
            assert (refused.status_code, "set-cookie" in refused.headers) == (401, False)
            assert "does not know this token" in refused.text
    async with visiting(server, "operate") as visitor:
        cookie = f"mtask-{server.port}={visitor.http.cookies[f'mtask-{server.port}']}"
        api = await server.ask("GET", "/v1/tasks", token=None, headers={"Cookie": cookie})
        assert api.status_code == 401, "the API takes no cookie"
        assert (await visitor.send("/logout")).headers["location"] == "/login"
        again = await server.http.get("/tasks", headers={"Cookie": cookie})
        assert again.status_code == 303, "the session is over, though the cookie was kept"


async def test_a_link_with_a_token_signs_nobody_in_by_itself(server: Serving) -> None:
    """Else a link of another site could sign a visitor in under a token of that site's owner."""
    async with visiting(server) as visitor:
        shown = await visitor.get("/login?token=acme&next=%2Ftasks")
        assert (shown.status_code, "set-cookie" in shown.headers) == (200, False)
        for told in ("acme", "operate", 'value="/tasks"'):
            assert told in shown.text, "it says whose token this is"
        form = {"token": "acme", "next": "/tasks"}
        for origin in ("https://evil.example", server.url.replace("http:", "https:"), "null"):
            assert (await visitor.post("/login", form, Origin=origin)).status_code == 403, origin
        without = await visitor.http.post("/login", data=form)
        assert (without.status_code, "set-cookie" in without.headers) == (403, False)
        assert (await visitor.post("/login", form)).headers["location"] == "/tasks"
    async with visiting(server, "operate") as visitor:
        shown = await visitor.get("/login?token=acme")
        assert (shown.status_code, "signed in as" in shown.text) == (200, True)
        assert (await visitor.get("/queues")).status_code == 200, "the session is still that of operate"
        assert (await visitor.post("/login", {"token": "x" * 10_000})).status_code == 413


@pytest.mark.parametrize(
    "target", ["//evil.example", "https://evil.example", "/\\evil.example", "evil", "/a\r\nSet-Cookie: x=y", ""]
)
async def test_login_leads_to_no_other_site(server: Serving, target: str) -> None:
    async with visiting(server) as visitor:
        answer = await visitor.post("/login", {"token": "read", "next": target})
        assert answer.headers["location"] == "/"


async def test_forged_form_is_refused(server: Serving) -> None:
    await server.client.publish("echo", key="a", delay=3600)
    path = "/task/cancel?name=echo&key=a"
    async with visiting(server, "operate") as visitor, visiting(server, "operate") as other:
        own = {"csrf": await visitor.csrf()}
        forged: list[tuple[dict[str, str], dict[str, str]]] = [
            ({}, {}),
            ({"csrf": ""}, {}),
            ({"csrf": own["csrf"][:-1]}, {}),
            ({"csrf": await other.csrf()}, {}),
            (own, {"Origin": "https://evil.example"}),
            (own, {"Origin": "null"}),
            (own, {"Origin": f"http://127.0.0.1:{server.port + 1}"}),
            (own, {"Origin": server.url.replace("http:", "https:")}),
            (own, {"X-Forwarded-Proto": "https"}),
        ]
        for form, headers in forged:
            assert (await visitor.post(path, form, **headers)).status_code == 403, (form, headers)
        without_origin = await visitor.http.post(path, data=own)
        assert without_origin.status_code == 403
        as_json = await visitor.http.post(path, json=own, headers={"Origin": server.url})
        assert as_json.status_code == 415
        as_text = await visitor.http.post(
            path, content=f"csrf={own['csrf']}", headers={"Origin": server.url, "Content-Type": "text/plain"}
        )
        assert as_text.status_code == 415
        assert (await visitor.get(path)).status_code == 405, "a link changes nothing"
        assert (await server.client.get("echo", "a")).status == "INIT"
        by_header = await visitor.post(path, {}, **{"X-CSRF-Token": own["csrf"]})
        assert by_header.status_code == 303
        assert (await server.client.get("echo", "a")).status == "CANCELED"


async def test_each_change_takes_its_role(server: Serving) -> None:
    await server.client.publish("echo", key="a", delay=3600)
    for token in ("read", "publish", "acme"):
        async with visiting(server, token) as visitor:
            csrf = await visitor.csrf() if token != "acme" else _CSRF.search((await visitor.get("/flows")).text)[1]  # type: ignore[index]
            for path, form in _CHANGES.items():
                answer = await visitor.post(path, {"csrf": csrf, **form})
                is_of_tasks = path.startswith(("/task/", "/flow/"))
                if token == "read" or (token == "publish" and not path.startswith(_OF_PUBLISHERS)):
                    assert answer.status_code == 403, (token, path)
                elif token == "acme" and path.startswith("/bulk/"):
                    assert answer.status_code == (422 if path == "/bulk/run" else 200), (path, answer.text)
                elif token == "acme":
                    assert answer.status_code == (404 if is_of_tasks else 403), (token, path, answer.text)
                else:
                    assert answer.status_code in (303, 404, 409), (token, path)
    everything = {path.partition("?")[0] for path in _CHANGES}
    assert {path for method, path in all_addresses() if method == "POST"} == everything, "each change is tried"


async def test_read_only_server_refuses_all_changes_and_shows_no_forms(serving: Serve) -> None:
    async with serving(settings=WebSettings(port=0, is_read_only=True)) as server:
        await server.client.publish("echo", key="a", delay=3600)
        async with visiting(server, "operate") as visitor:
            csrf = await visitor.csrf()
            for path, form in _CHANGES.items():
                assert (await visitor.post(path, {"csrf": csrf, **form})).status_code == 403, path
            for path in ("/task?name=echo&key=a", "/queue?queue=default", "/schedules", "/workers"):
                forms = re.findall(r'<form method="post" action="([^"]+)"', (await visitor.get(path)).text)
                assert forms == ["/logout"], path


async def _is_canceled(server: Serving, key: str) -> bool:
    return (await server.client.get("echo", key)).status == "CANCELED"


async def test_tenants_never_meet(server: Serving) -> None:
    for tenant in ("acme", "umbra"):
        await server.client.publish("echo", {"of": tenant}, key="same", tenant=tenant, delay=3600)
    async with visiting(server, "acme") as acme:
        shown = await acme.get("/task?name=echo&key=same")
        assert "acme&#34;" in shown.text
        assert "umbra" not in shown.text
        assert "acme:same" not in shown.text
        for key in ("umbra:same", "acme:same", ":same"):
            assert (await acme.get(f"/task?name=echo&key={key}")).status_code == 404, key
        listed = await acme.get("/tasks?name=echo&key=same")
        assert listed.status_code == 200
        assert listed.text.count("<tr data-id=") == 1
        everything = (await acme.get("/tasks")).text
        assert (everything.count("<tr data-id="), "umbra" in everything) == (1, False)
        for path in ("/log", "/queues", "/queue?queue=default", "/workers", "/schedules"):
            assert (await acme.get(path)).status_code == 403, path
        assert (await acme.get("/")).headers["location"] == "/tasks"
        planned = await acme.send("/bulk/plan?name=echo", action="cancel")
        assert "Cancel 1 task?" in planned.text, "a plan counts only what the tenant may change"
        plan = re.search(r'name="plan" value="([^"]+)"', planned.text)
        assert plan is not None
        async with visiting(server, "umbra") as umbra:
            stolen = await umbra.send("/bulk/run", action="cancel", plan=plan[1])
            assert stolen.status_code == 422
        begun = await acme.send("/bulk/run", action="cancel", plan=plan[1])
        assert begun.status_code == 303
        await until(lambda: _is_canceled(server, "acme:same"))
        assert "acme:" not in (await acme.get("/bulk")).text
        async with visiting(server, "umbra") as umbra:
            assert (await umbra.get(begun.headers["location"])).status_code == 404
            assert "Nobody has changed" in (await umbra.get("/bulk")).text
        assert (await acme.send("/task/cancel?name=echo&key=same")).status_code == 303
    assert (await server.client.get("echo", "acme:same")).status == "CANCELED"
    assert (await server.client.get("echo", "umbra:same")).status == "INIT"


async def test_page_filters_by_tenant_and_sets_fair_turns_and_limits(server: Serving) -> None:
    for tenant in ("acme", "umbra", None):
        await server.client.publish("echo", key="same", tenant=tenant, delay=3600)
    async with visiting(server, "operate") as visitor:
        listed = (await visitor.get("/tasks?tenant=acme")).text
        assert (listed.count("<tr data-id="), 'data-id="echo:acme:same"' in listed) == (1, True)
        of_key = (await visitor.get("/tasks?tenant=umbra&key=same")).text
        assert (of_key.count("<tr data-id="), 'data-id="echo:umbra:same"' in of_key) == (1, True)
        assert "use 1 to 64 letters" in (await visitor.get("/tasks?tenant=a:b")).text
        assert "/tasks?tenant=acme" in (await visitor.get("/task?name=echo&key=acme:same")).text
        planned = await visitor.send("/bulk/plan?tenant=acme", action="cancel")
        assert "Cancel 1 task?" in planned.text
        assert "Fair turns for tenants" in (await visitor.get("/queue?queue=default")).text
        assert (await visitor.send("/queue/fair?queue=default")).status_code == 303
        limits = {"tenant_concurrency": "5", "tenant_starts": "3", "tenant_window": "2"}
        assert (await visitor.send("/queue/limit?queue=default", **limits)).status_code == 303
        shown = (await visitor.get("/queue?queue=default")).text
        assert "End the fair turns" in shown
        assert "5 at once, 3 starts in 2 s for each tenant" in shown
        await visitor.send("/queue/unfair?queue=default")
    (control,) = await server.client.controls()
    assert (control.fair, control.tenant_limit is not None) == (False, True)
    async with visiting(server, "acme") as acme:
        # The filter of another tenant changes nothing for a tenant.
        assert (await acme.get("/tasks?tenant=umbra")).text.count("<tr data-id=") == 1
        assert 'name="tenant"' not in (await acme.get("/tasks")).text


async def test_open_server_still_binds_forms_to_a_session(serving: Serve) -> None:
    async with serving(settings=WebSettings(port=0, is_open=True)) as server:
        await server.client.publish("echo", key="a", delay=3600)
        async with visiting(server) as visitor:
            first = await visitor.get("/tasks")
            assert first.status_code == 200
            assert "HttpOnly; SameSite=Strict" in first.headers["set-cookie"]
            assert (await visitor.post("/task/cancel?name=echo&key=a", {})).status_code == 403
            assert (await visitor.send("/task/cancel?name=echo&key=a")).status_code == 303
            assert (await visitor.get("/login")).headers["location"] == "/"


async def test_every_answer_carries_the_security_headers(server: Serving) -> None:
    async with visiting(server, "operate") as visitor:
        links = set(re.findall(r'(?:src|href)="(/static/[^"]+)"', (await visitor.get("/")).text))
        assert len(links) >= 6
        for path in (
            *_VIEWS[:-1],
            *sorted(links),
            "/login",
            "/task?name=no&key=no",
            "/tasks?status=WRONG",
            "/static/no",
        ):
            answer = await visitor.get(path)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["x-frame-options"] == "DENY"
            if not path.startswith("/static/"):
                assert answer.headers["cache-control"] == "no-store"
            if "text/html" in answer.headers.get("content-type", ""):
                assert not re.search(r"<(script|link|img)[^>]+=\"?(https?:)?//", answer.text)
                assert not re.search(r"<script(?![^>]*\ssrc=)[^>]*>|\sstyle=|\son\w+=|javascript:", answer.text), path
        rebound = await server.http.get("/login", headers={"Host": "evil.example"})
        assert rebound.status_code == 421


async def test_a_head_request_opens_no_live_stream(server: Serving) -> None:
    async with visiting(server, "read") as visitor:
        assert (await visitor.http.head("/tasks")).status_code == 200
        live = await visitor.http.head("/live")
        assert (live.status_code, live.headers["allow"]) == (405, "GET"), "its viewer would never leave"
        assert server.hub.viewer_cnt == 0


async def test_a_referer_that_is_no_address_leads_to_no_page(server: Serving) -> None:
    async with visiting(server, "operate") as visitor:
        wrong = await visitor.get("/task?name=no&key=no", Referer="http://[")
        assert (wrong.status_code, 'href="/">Back' in wrong.text) == (404, True)
        csrf = {"csrf": await visitor.csrf()}
        paused = await visitor.post("/queue/pause?queue=q", csrf, Referer="http://[")
        assert (paused.status_code, paused.headers["location"]) == (303, "/queue?queue=q")


async def test_browser_at_an_unknown_address_gets_a_page_and_a_program_a_problem(server: Serving) -> None:
    html = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
    async with visiting(server, "read") as visitor:
        for path in ("/nowhere", "/tasks/echo/a", "/tasks/", "/" + "x" * 300):
            page = await visitor.get(path, **html)
            assert (page.status_code, page.headers["content-type"]) == (404, "text/html; charset=utf-8"), path
            assert "There is no such address." in page.text
            assert 'href="/tasks"' in page.text, "it leads on"
        for path in ("/v1/nowhere", "/v1/tasks:nothing", "/metrics", "/jobs"):
            answer = await visitor.get(path, **html)
            assert (answer.status_code, answer.headers["content-type"]) == (401, "application/problem+json"), path
        assert (await visitor.get("/nowhere")).headers["content-type"] == "application/problem+json"
    async with visiting(server) as stranger:
        led = await stranger.get("/nowhere", **html)
        assert (led.status_code, led.headers["location"]) == (303, "/login?next=%2Fnowhere")

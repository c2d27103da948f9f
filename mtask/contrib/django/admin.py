"""The admin: the entry "Tasks" leads to mtask's page, whose address a backend has as WEB_URL."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect

from mtask.contrib.django.models import Tasks
from mtask.contrib.django.targets import backends


def web_url() -> str | None:
    """Return the first address of a page in `TASKS`."""
    return next((backend.web_url for backend in backends() if backend.web_url), None)


@admin.register(Tasks)
class TasksAdmin(admin.ModelAdmin):  # type: ignore[type-arg]  # it has no parameters at run time
    """Leads to mtask's page. Without an address, the entry is not shown."""

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Lead to mtask's page."""
        address = web_url()
        if address is None or not self.has_view_permission(request):
            raise Http404
        return HttpResponseRedirect(address)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Whether there is an address, and the user has the permission."""
        return web_url() is not None and super().has_view_permission(request, obj)

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Nothing is added here."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nothing is changed here."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nothing is deleted here."""
        return False

"""A Django service that publishes in its own MongoDB transaction: the order and its task exist together, or neither.

Run a worker:     mtask-worker examples.app:app --queues mail
Run the service:  python -m examples.django_service runserver --noreload

Both find MongoDB by MTASK_URI. It takes `pip install django`. For production
give any WSGI server `examples.django_service:application`. Then:

  curl localhost:8000/orders/7 --json '{"item": "book", "to": "ada@example.com"}'
"""

from __future__ import annotations

import json
import os
import sys
from functools import cache
from typing import Any

from django.conf import settings
from django.core.management import execute_from_command_line
from django.core.wsgi import get_wsgi_application
from django.http import HttpRequest, JsonResponse
from django.urls import path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_POST
from pymongo import MongoClient
from pymongo.client_session import ClientSession
from pymongo.errors import DuplicateKeyError

from mtask import Client

settings.configure(
    SECRET_KEY=os.environ.get("SECRET_KEY", "for development"),
    ALLOWED_HOSTS=["localhost", "127.0.0.1"],
    ROOT_URLCONF=__name__,
    WSGI_APPLICATION=f"{__name__}.application",
)
SHOP = os.environ.get("SHOP_DATABASE", "shop")


@cache  # made by the first request, so in each process of a server that forks
def mongo() -> MongoClient[dict[str, Any]]:
    """Return the service's one MongoClient."""
    return MongoClient(os.environ["MTASK_URI"], tz_aware=True)


@cache
def tasks() -> Client:
    """Return the mtask client on the same connections; a transaction belongs to one MongoClient."""
    return Client(mongo(), database=os.environ.get("MTASK_DATABASE", "mtask"))


class SoldOut(Exception):
    """Nothing of an item is left."""


@csrf_exempt  # called by programs, not from forms
@require_POST
def order(request: HttpRequest, number: int) -> JsonResponse:
    """Take an order: store it, publish its mail, take the item from stock. All of it, or nothing."""
    wanted = json.loads(request.body)
    shop = mongo()[SHOP]

    def take(session: ClientSession) -> None:
        shop["orders"].insert_one({"_id": number, "item": wanted["item"]}, session=session)
        mail = {"to": wanted["to"], "subject": f"Your order {number}"}
        tasks().publish("send_email", mail, key=f"order/{number}", queue="mail", session=session)
        left = {"_id": wanted["item"], "left": {"$gt": 0}}
        if not shop["stock"].update_one(left, {"$inc": {"left": -1}}, session=session).matched_count:
            raise SoldOut  # undoes the order and the task, too

    try:
        with mongo().start_session() as session:
            session.with_transaction(take)  # calls it again where another transaction came in between
    except DuplicateKeyError:
        return JsonResponse({"order": number, "problem": "this number is taken"}, status=409)
    except SoldOut:
        return JsonResponse({"order": number, "problem": "sold out"}, status=409)
    return JsonResponse({"order": number, "mail": f"order/{number}"}, status=202)


urlpatterns = [path("orders/<int:number>", order)]
application = get_wsgi_application()

if __name__ == "__main__":
    execute_from_command_line(sys.argv)

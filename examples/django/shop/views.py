"""The pages of the shop."""

import json

from django.http import Http404, JsonResponse
from django.views.decorators.csrf import csrf_exempt
from django_mongodb_backend.transaction import atomic

from shop.models import Order
from shop.tasks import confirm


class SoldOut(Exception):
    """Nothing of an item is left."""


@csrf_exempt  # called by programs, not from forms
def order(request, number):
    """Take an order with its mail, or neither; or show the state of its mail."""
    if request.method == "POST":
        wanted = json.loads(request.body)
        try:
            with atomic():
                made = Order.objects.create(number=number, item=wanted["item"], to=wanted["to"])
                result = confirm.using(key=f"order/{number}").enqueue(number)
                if made.item == "unicorn":
                    raise SoldOut  # undoes the order and the task
        except SoldOut:
            return JsonResponse({"order": number, "problem": "sold out"}, status=409)
        return JsonResponse({"order": number, "mail": result.id}, status=202)
    found = Order.objects.filter(number=number).first()
    if found is None:
        raise Http404
    result = confirm.get_result(f"{confirm.module_path}:order/{number}")
    return JsonResponse({"order": number, "mailed": found.mailed, "mail": result.status})

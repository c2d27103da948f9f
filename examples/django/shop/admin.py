"""Orders in the admin. The entry "Tasks" is mtask's own."""

from django.contrib import admin

from shop.models import Order

admin.site.register(Order)

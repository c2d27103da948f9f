"""The addresses of the shop."""

from django.contrib import admin
from django.urls import path

from shop.views import order

urlpatterns = [path("admin/", admin.site.urls), path("orders/<int:number>", order)]

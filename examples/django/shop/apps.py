"""The apps: those of Django get keys as MongoDB has them."""

from django.apps import AppConfig
from django.contrib.admin.apps import AdminConfig
from django.contrib.auth.apps import AuthConfig
from django.contrib.contenttypes.apps import ContentTypesConfig

KEYS = "django_mongodb_backend.fields.ObjectIdAutoField"


class MongoAdmin(AdminConfig):
    """The admin."""

    default_auto_field = KEYS


class MongoAuth(AuthConfig):
    """Users and permissions."""

    default_auto_field = KEYS


class MongoContentTypes(ContentTypesConfig):
    """The kinds of models."""

    default_auto_field = KEYS


class Shop(AppConfig):
    """The shop itself."""

    name = "shop"

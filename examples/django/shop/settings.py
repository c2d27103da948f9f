"""The settings of the shop. Its models and its tasks are in one MongoDB."""

import os

SECRET_KEY = os.environ.get("SECRET_KEY", "for development")
DEBUG = True
ALLOWED_HOSTS = ["localhost", "127.0.0.1"]
ROOT_URLCONF = "shop.urls"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django_mongodb_backend.fields.ObjectIdAutoField"
DATABASES = {
    "default": {
        "ENGINE": "django_mongodb_backend",
        "HOST": os.environ.get("MTASK_URI", "mongodb://localhost:27017"),
        "NAME": os.environ.get("SHOP_DATABASE", "shop"),
    }
}
INSTALLED_APPS = [
    "shop.apps.MongoAdmin",
    "shop.apps.MongoAuth",
    "shop.apps.MongoContentTypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "mtask.contrib.django",
    "shop.apps.Shop",
]
MIGRATION_MODULES = dict.fromkeys(("admin", "auth", "contenttypes", "sessions"))  # their own are for SQL
TASKS = {
    "default": {
        "BACKEND": "mtask.contrib.django.MtaskBackend",
        "QUEUES": ["default", "mail"],
        "OPTIONS": {"DATABASE": "default", "WEB_URL": os.environ.get("SHOP_WEB_URL", "http://localhost:8080/")},
    }
}
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
STATIC_URL = "static/"

"""Settings of the site. SHOP_DATABASE names its database, which the tasks share: a SQLite file here by default."""

import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_HERE = Path(__file__).resolve().parent.parent
SHOP_DATABASE = os.environ.get("SHOP_DATABASE", f"sqlite:///{_HERE}/shop.db")
SHOP_CLOSES_AFTER = os.environ.get("SHOP_CLOSES_AFTER", "15m")

_url = urlsplit(SHOP_DATABASE)
_database: dict[str, Any]
if _url.scheme == "sqlite":
    # IMMEDIATE: who will write waits its turn at the beginning, and not with a transaction that can no longer go on
    _database = {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": unquote(_url.path.removeprefix("/")),
        "OPTIONS": {"transaction_mode": "IMMEDIATE"},
    }
else:
    _database = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": _url.path.removeprefix("/"),
        "HOST": _url.hostname,
        "PORT": _url.port or 5432,
        "USER": unquote(_url.username or ""),
        "PASSWORD": unquote(_url.password or ""),
        "CONN_MAX_AGE": 60,
    }
DATABASES = {"default": _database}

SECRET_KEY = os.environ.get("SHOP_SECRET_KEY", "only for an example")
ALLOWED_HOSTS = ["localhost", "testserver"]
INSTALLED_APPS = ["orders"]
ROOT_URLCONF = "shop.urls"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True

"""Where things are."""

from django.urls import path
from orders import views

urlpatterns = [
    path("orders", views.place),
    path("orders/<int:number>", views.look),
    path("orders/<int:number>/pay", views.pay),
]

"""The tracking database itself: how it is opened, its tables, its versions, and how its errors read."""

"""The web page of `mtask web`: server-rendered views, live by one stream of events however many viewers there are."""

"""One long request over several devices: what each rank computes and sends, and how long that takes."""

"""The routes under /flexfloor/ in the server's main process."""

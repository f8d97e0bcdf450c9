"""Engines other than kvlab's own, each a ServingEngine that talks to a server or to a process."""

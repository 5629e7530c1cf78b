"""Callbacks for the trainers of other libraries, a module for each; importing this one loads none of them."""

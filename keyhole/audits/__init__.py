"""Findings about a part or a model: is it honest, is its fast form faithful?"""

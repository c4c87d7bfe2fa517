"""The OpenAPI document: it has every route with its scope, its schemas are valid, and every reference resolves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from holdfast.ops.http.openapi import documented_routes, openapi_document
from tests.api_server.served_rig import ONE_SCOPE_EACH, ServedRig, client, rig, token_of
from tests.ops.http_rig import JsonClient

__all__ = ["client", "rig"]

pytestmark = pytest.mark.timeout(60)


def nodes(value: Any) -> Iterator[dict[str, Any]]:
    """Every object of a document."""
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from nodes(item)


def test_document_has_every_route_of_the_server_with_its_scope(rig: ServedRig) -> None:
    served = {
        (route.method, route.path): ()
        if route.open
        else tuple(scope.value for scope in route.scopes)
        for route in rig.bank().routes
    }
    documented = {}
    for path, operations in openapi_document()["paths"].items():
        parts = tuple("*" if part.startswith("{") else part for part in path[1:].split("/"))
        for method, operation in operations.items():
            scopes = [operation["x-scope"]] if "x-scope" in operation else []
            if "x-body-scope" in operation:
                scopes.append(operation["x-body-scope"]["scope"])
            documented[method.upper(), parts] = tuple(scopes)
    assert documented == served


def test_operation_ids_are_unique() -> None:
    ids = [route.operation_id for route in documented_routes()]
    assert len(ids) == len(set(ids))


def test_every_schema_is_valid_and_every_reference_resolves() -> None:
    document = openapi_document()
    for schema in document["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    for node in nodes(document):
        if isinstance(reference := node.get("$ref"), str):
            found: Any = document
            for part in reference.removeprefix("#/").split("/"):
                found = found[part]
            assert isinstance(found, dict)
        if isinstance(schema := node.get("schema"), dict):
            Draft202012Validator.check_schema(schema)


def test_object_without_declared_members_may_have_any() -> None:
    schemas = openapi_document()["components"]["schemas"]
    assert schemas["StartFlowBody"]["properties"]["kwargs"]["additionalProperties"] is True
    assert schemas["StartFlowBody"]["additionalProperties"] is False
    for node in nodes(schemas):
        if node.get("type") == "object":
            assert "properties" in node or "additionalProperties" in node


def test_path_parameters_are_those_of_the_path() -> None:
    for path, operations in openapi_document()["paths"].items():
        names = {part[1:-1] for part in path.split("/") if part.startswith("{")}
        for operation in operations.values():
            declared = {one["name"] for one in operation["parameters"] if one["in"] == "path"}
            assert declared == names


def resolve(document: Any, schema: Any, pointer: str) -> Any:
    """The schema of the value at a JSON pointer, through references, alternatives and lists."""
    for part in pointer.split("/")[1:]:
        while "$ref" in schema:
            schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        schema = schema["items"] if part.isdigit() else schema["properties"][part]
    return schema


def test_every_link_names_an_operation_its_parameters_and_values_that_exist() -> None:
    document = openapi_document()
    found = {
        operation["operationId"]: (path, operation)
        for path, operations in document["paths"].items()
        for operation in operations.values()
    }
    named: set[str] = set()
    for source, operation in found.values():
        for response in operation["responses"].values():
            for name, link in response.get("links", {}).items():
                assert name == link["operationId"]
                _, target = found[name]
                parameters = link.get("parameters", {})
                declared = {one["name"] for one in target["parameters"] if one["in"] == "path"}
                assert set(parameters) == declared, (source, name)
                for value in (*parameters.values(), *link.get("requestBody", {}).values()):
                    kind, _, rest = value.partition("#" if "#" in value else ".path.")
                    if kind == "$request":
                        assert "{" + rest + "}" in source
                    else:
                        owner = response if kind == "$response.body" else operation["requestBody"]
                        schema = owner["content"]["application/json"]["schema"]
                        assert resolve(document, schema, rest)
                named.add(name)
    for name in ("purge_world", "fork_world", "show_task", "delete_schedule", "complete_tasks"):
        assert name in named


def test_server_serves_the_document_to_clients_with_the_scope_read(rig: ServedRig) -> None:
    server = rig.bank(ONE_SCOPE_EACH)
    answer = rig.client(server, token_of("read")).get("/v1/openapi.json")
    assert (answer.status, answer.document["openapi"]) == (200, "3.1.0")
    assert "/v1/worlds/{type}/{name}/state" in answer.document["paths"]
    assert rig.client(server, token_of("submit")).get("/v1/openapi.json").status == 403


def test_answer_of_a_world_matches_its_schema(client: JsonClient) -> None:
    document = client.get("/v1/openapi.json").document
    created = client.post("/v1/worlds", {"type": "QuotedAccount", "name": "ada"}).document
    schema = {"$ref": "#/components/schemas/WorldWithLineage", **document}
    validator = Draft202012Validator(schema)
    assert list(validator.iter_errors(created)) == []
    assert list(validator.iter_errors({**created, "height": "x"})) != []

// Microsoft's SignalR client against the hub at argv[2]; prints one JSON object of what it saw.
"use strict";

const { HttpTransportType, HubConnectionBuilder, LogLevel } = require("@microsoft/signalr");

const url = process.argv[2];
const seen = {};

function build(token) {
  return new HubConnectionBuilder()
    .withUrl(url, { accessTokenFactory: () => token })
    .configureLogging(LogLevel.None)
    .withAutomaticReconnect([0, 50, 200, 1000])
    .build();
}

async function failure(promise) {
  try {
    await promise;
    return null;
  } catch (error) {
    return error.message;
  }
}

function once(register) {
  return new Promise((resolve) => register(resolve));
}

async function calls() {
  const connection = build("ann");
  const offers = [];
  connection.on("Offer", (payload) => offers.push(payload));
  await connection.start();
  seen.transport = connection.connection.transport.constructor.name;
  seen.echo = await connection.invoke("Echo", { text: "é☃\u2028", none: null, list: [1, 2.5] });
  seen.void = await connection.invoke("Void", {});
  seen.hubException = await failure(connection.invoke("Told", {}));
  seen.masked = await failure(connection.invoke("Masked", {}));
  seen.unknown = await failure(connection.invoke("Nowhere", {}));
  seen.argumentCount = await failure(connection.invoke("Echo", 1, 2));
  seen.stream = await failure(
    once((resolve) => {
      connection.stream("Echo", 1).subscribe({
        next: () => resolve("an item came"),
        complete: () => resolve("it completed"),
        error: (error) => resolve(Promise.reject(error)),
      });
    }),
  );
  await connection.invoke("Push", { count: 200 });
  seen.offers = offers.map((offer) => offer.n);
  seen.large = (await connection.invoke("Echo", "x".repeat(32000))).length;
  await connection.send("Echo", "no answer wanted");
  const many = [];
  for (let n = 0; n < 100; n += 1) many.push(connection.invoke("Echo", n));
  seen.many = await Promise.all(many);
  await connection.stop();
  seen.stopped = connection.state;
}

async function idle() {
  const connection = build("ann");
  connection.serverTimeoutInMilliseconds = 600;
  connection.keepAliveIntervalInMilliseconds = 150;
  let closed = false;
  connection.onreconnecting(() => { closed = true; });
  await connection.start();
  await new Promise((resolve) => setTimeout(resolve, 1500));
  seen.idle = { closed, echo: await connection.invoke("Echo", "awake") };
  await connection.stop();
}

async function comingBack() {
  const connection = build("ann");
  const reconnected = once((resolve) => connection.onreconnected(resolve));
  await connection.start();
  const before = connection.connectionId;
  const left = failure(connection.invoke("ComeBack", {}));
  await reconnected;
  seen.comeBack = {
    left: await left,
    newId: connection.connectionId !== before,
    echo: await connection.invoke("Echo", 7),
  };
  await connection.stop();
}

async function endings() {
  let connection = build("ann");
  let closed = once((resolve) => connection.onclose(resolve));
  await connection.start();
  await failure(connection.invoke("GoAway", {}));
  seen.goAway = (await closed).message;

  connection = build("ann");
  closed = once((resolve) => connection.onclose(resolve));
  await connection.start();
  await failure(connection.invoke("Echo", "x".repeat(40000)));
  seen.oversize = (await closed).message;

  seen.unauthorized = await failure(build("eve").start());
  const polling = new HubConnectionBuilder()
    .withUrl(url, { accessTokenFactory: () => "ann", transport: HttpTransportType.LongPolling })
    .configureLogging(LogLevel.None)
    .build();
  seen.longPolling = await failure(polling.start());
}

(async () => {
  await calls();
  await idle();
  await comingBack();
  await endings();
  console.log(JSON.stringify(seen));
  process.exit(0);
})().catch((error) => {
  console.error(error);
  process.exit(1);
});

// A SignalR hub on ASP.NET Core, as a team would write one: what our client is tried against.
// Arguments: the token to ask for. Listens on a free port of 127.0.0.1 and prints its address.
using System;
using System.Linq;
using System.Text.Json;
using System.Text.Json.Serialization;
using System.Threading.Tasks;
using Microsoft.AspNetCore.Builder;
using Microsoft.AspNetCore.Hosting;
using Microsoft.AspNetCore.Hosting.Server;
using Microsoft.AspNetCore.Hosting.Server.Features;
using Microsoft.AspNetCore.SignalR;
using Microsoft.Extensions.DependencyInjection;
using Microsoft.Extensions.Hosting;
using Microsoft.Extensions.Logging;

public enum RunnerState { Online, Draining, Stopping }

public class Beat
{
    public string RunnerId { get; set; }
    public RunnerState State { get; set; }
    public DateTimeOffset SentAt { get; set; }
    public long FreeBytes { get; set; }
}

public class RunnerHub : Hub
{
    public JsonElement Echo(JsonElement payload) => payload;

    public Beat Heartbeat(Beat beat) => beat;

    public void Told(JsonElement _) => throw new HubException("the runner is unknown");

    public void Crash(JsonElement _) => throw new InvalidOperationException("the password is hunter2");

    public async Task<JsonElement> Slow(JsonElement payload)
    {
        await Task.Delay(payload.GetProperty("delayMs").GetInt32());
        return payload;
    }

    public async Task<bool> Push(JsonElement payload)
    {
        for (var n = 0; n < payload.GetProperty("count").GetInt32(); n++)
        {
            var text = new string('x', payload.GetProperty("sizeBytes").GetInt32());
            await Clients.Caller.SendAsync("Offer", new { N = n, Text = text });
        }
        return true;
    }

    public void Leave(JsonElement _) => Context.Abort();
}

public static class Program
{
    public static void Main(string[] arguments)
    {
        var host = Host.CreateDefaultBuilder()
            .ConfigureLogging(logging => logging.ClearProviders())
            .ConfigureWebHostDefaults(web => web
                .UseUrls("http://127.0.0.1:0")
                .ConfigureServices(services => services
                    .AddSignalR(options =>
                    {
                        options.KeepAliveInterval = TimeSpan.FromMilliseconds(500);
                        options.ClientTimeoutInterval = TimeSpan.FromMilliseconds(1500);
                    })
                    .AddJsonProtocol(options => options.PayloadSerializerOptions.Converters.Add(
                        new JsonStringEnumConverter(JsonNamingPolicy.CamelCase))))
                .Configure(app =>
                {
                    app.Use(async (context, next) =>
                    {
                        if (context.Request.Headers["Authorization"] != "Bearer " + arguments[0])
                        {
                            context.Response.StatusCode = 401;
                            return;
                        }
                        await next();
                    });
                    app.UseRouting();
                    app.UseEndpoints(endpoints => endpoints.MapHub<RunnerHub>("/hubs/runner"));
                }))
            .Build();
        host.Start();
        var server = host.Services.GetRequiredService<IServer>();
        Console.WriteLine(server.Features.Get<IServerAddressesFeature>().Addresses.First());
        host.WaitForShutdown();
    }
}
